"""Generation and embedding with `tiny`: one pass over the prompts of new rows, and one step for the next byte of all
others.

The result of a row depends on that row alone, not on its batch (gpu_pool/backends/tiny/sampling.py): always at
temperature 0, and with a seed at any temperature. An embedding is the mean of the last hidden states, normalised to
length one; a text longer than the context is read in pieces, weighted by their length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from gpu_pool.backends.backend import Item, ItemResult, OutputListener, Padding
from gpu_pool.backends.device import select_device
from gpu_pool.backends.generation import Generation, GenerationParameters, prompt_of, read_parameters, running_text
from gpu_pool.backends.stepping import RowLoop
from gpu_pool.backends.tiny import model
from gpu_pool.backends.tiny.model import VERSION, Cache, Network, load_network, nothing
from gpu_pool.backends.tiny.row import TinySequence
from gpu_pool.backends.tiny.sampling import choose
from scheduler.vectors import write_vector

LARGEST_BATCH = 64
"""Rows that run together; more wait until others have ended."""


class Embedded(NamedTuple):
    """A text's vector, and the number of its tokens."""

    values: list[float]
    tokens: int


class TinyModel:
    """The loaded model. Not thread-safe."""

    def __init__(self, network: Network, device: torch.device) -> None:
        self.version = VERSION
        self.padding = Padding()
        self._network = network
        self._device = device

    @classmethod
    def load(cls, device: str = "auto", threads: int | None = None) -> TinyModel:
        """Load the shipped weights onto `device`: `cpu`, `cuda`, `cuda:N`, or `auto` (CUDA if available).

        `threads` sets torch's CPU threads for the whole process, 1 if it is None: the matrices are so small that a
        second thread gains a quarter on idle cores and loses tenfold on busy ones. Raises `WeightsError` if the weights
        are not those of this version, `StartError` if the device does not exist.
        """
        torch.set_num_threads(1 if threads is None else threads)
        place = select_device(device)
        return cls(load_network(place), place)

    def generate(
        self,
        prompts: Sequence[str],
        parameters: Sequence[GenerationParameters],
        on_step: Callable[[], None] | None = None,
        listeners: Sequence[OutputListener | None] | None = None,
    ) -> list[Generation]:
        """The continuation of each prompt, in order; `on_step` is called after each layer of each pass, since one pass
        over long prompts takes seconds on a busy CPU.

        `listeners`, one for each prompt or None, receive each continuation as it grows; one that is gone ends it. A
        prompt too long for the context keeps its last bytes. Raises `ValueError` if the lists differ in length,
        `FloatingPointError` if the network computes NaN or infinity.
        """
        rows = [
            TinySequence.start(prompt, each, self._network.shape.context, listener)
            for prompt, each, listener in zip(prompts, parameters, listeners or [None] * len(prompts), strict=True)
        ]
        loop, waiting, running = self.loop(), list(enumerate(rows))[::-1], 0
        while waiting or running:
            while waiting and running < LARGEST_BATCH:
                loop.add_row(*waiting.pop())
                running += 1
            running -= len(loop.step(on_step or nothing))
        return [row.result() for row in rows]

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], on_step: Callable[[], None] = nothing) -> list[Embedded]:
        """A vector for each text, in order; `on_step` is called after each layer of each pass."""
        network, context = self._network, self._network.shape.context
        pieces: list[tuple[int, list[int]]] = []
        for place, text in enumerate(texts):
            tokens = model.encode(text, 4 * len(text))  # More than its bytes.
            pieces += [(place, tokens[start : start + context]) for start in range(0, len(tokens), context)]
        sums = torch.zeros(len(texts), network.shape.width, dtype=torch.float64)
        counts = [0] * len(texts)
        for first in range(0, len(pieces), LARGEST_BATCH):
            part = pieces[first : first + LARGEST_BATCH]
            lengths = [len(piece) for _, piece in part]
            self.padding.passed(lengths)
            # Padding is behind a piece, where attention does not reach.
            widest = max(lengths)
            padded = [piece + [model.PAD] * (widest - len(piece)) for _, piece in part]
            states = network.hidden(torch.tensor(padded, device=self._device), on_step).to("cpu", torch.float64)
            real = torch.arange(widest).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
            totals = (states * real.unsqueeze(-1)).sum(dim=1)
            for (place, piece), total in zip(part, totals, strict=True):
                sums[place] += total
                counts[place] += len(piece)
        vectors = functional.normalize(sums, dim=-1)
        return [Embedded(values, count - 1) for values, count in zip(vectors.tolist(), counts, strict=True)]

    def loop(self) -> RowLoop[TinySequence]:
        """A loop of its own, without rows."""
        return RowLoop(TinyDecoder(self._network, self._device, self.padding), self._prepare, self._vectors)

    def _prepare(self, item: Item) -> TinySequence | ItemResult:
        parameters = read_parameters(item)
        if isinstance(parameters, ItemResult):
            return parameters
        return TinySequence.start(prompt_of(item, running_text), parameters, self._network.shape.context, item.listener)

    def _vectors(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        embedded = self.embed([item.input for item in items], progress)
        return [ItemResult(write_vector(each.values), each.tokens) for each in embedded]


class TinyDecoder:
    """The rows of one loop, without gaps: the last row takes the place of one that leaves. `padding` counts the passes."""

    def __init__(self, network: Network, device: torch.device, padding: Padding) -> None:
        self._network = network
        self._device = device
        self._padding = padding
        self._cache = Cache(network.shape, device)
        self._rows: list[TinySequence] = []

    @torch.inference_mode()
    def join(self, rows: Sequence[TinySequence], progress: Callable[[], None]) -> None:
        """Read the prompts of new rows, and add the first token to each."""
        first, lengths = len(self._rows), [len(row.tokens) for row in rows]
        self._cache.reserve(first + len(rows), max(row.longest for row in rows))
        self._rows += rows
        self._padding.passed(lengths)
        widest = max(lengths)
        tokens = [row.tokens + [model.PAD] * (widest - len(row.tokens)) for row in rows]
        positions = torch.arange(widest, device=self._device).expand(len(rows), widest)
        last = torch.tensor(lengths, device=self._device) - 1
        ids = torch.tensor(tokens, device=self._device)
        scores = self._network.step(ids, positions, widest, self._cache, last, first=first, on_layer=progress)
        self._draw(rows, scores, progress)

    @torch.inference_mode()
    def advance(self, progress: Callable[[], None]) -> None:
        """Add one token to each row."""
        rows = self._rows
        self._padding.stepped(len(rows), len(rows))
        tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=self._device)
        positions = torch.tensor([[len(row.tokens) - 1] for row in rows], device=self._device)
        reach, last = max(len(row.tokens) for row in rows), torch.zeros_like(positions[:, 0])
        scores = self._network.step(tokens, positions, reach, self._cache, last, on_layer=progress)
        self._draw(rows, scores, progress)

    @torch.inference_mode()
    def leave(self, rows: Sequence[TinySequence]) -> None:
        """Remove these rows."""
        for row in rows:
            place, last = self._rows.index(row), self._rows.pop()
            if last is not row:
                self._rows[place] = last
                self._cache.move(len(self._rows), place, len(last.tokens))

    def reset(self) -> None:
        """Remove all rows; their cache may be too large for the device."""
        self._rows = []
        self._cache = Cache(self._network.shape, self._device)

    def _draw(self, rows: Sequence[TinySequence], scores: Tensor, progress: Callable[[], None]) -> None:
        """Choose each row's next token; a choice within rounding noise is recomputed from the row alone."""
        tokens, clear = _choose(rows, scores)
        for row, token, settled in zip(rows, tokens, clear, strict=True):
            if not settled and row.repeatable:
                # Without cache and other rows the scores are the same in every batch.
                alone = cast("Tensor", self._network(torch.tensor([row.tokens], device=self._device)))
                token = _choose([row], alone[:, -1])[0][0]
                progress()
            row.take(token)


def _choose(rows: Sequence[TinySequence], scores: Tensor) -> tuple[list[int], list[bool]]:
    wide = scores.to("cpu", torch.float64, copy=True)
    if not bool(wide.isfinite().all()):
        raise FloatingPointError("The network's scores are not finite.")  # Any choice would be meaningless.
    for index, row in enumerate(rows):
        wide[index, row.refused()] = -torch.inf
    parameters = [[row.parameters.temperature, row.parameters.top_p, row.next_uniform()] for row in rows]
    temperature, top_p, uniform = torch.tensor(parameters, dtype=torch.float64).unbind(1)
    choice = choose(wide, temperature, top_p, uniform)
    return choice.tokens, choice.clear
