"""Generation and embedding with `tiny`: one pass over the prompts, then one step for each byte until every row has
ended.

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

from gpu_pool.backends.backend import OutputListener, Padding
from gpu_pool.backends.device import select_device
from gpu_pool.backends.generation import Generation, GenerationParameters
from gpu_pool.backends.tiny import model
from gpu_pool.backends.tiny.model import VERSION, Cache, Network, load_network, nothing
from gpu_pool.backends.tiny.row import TinySequence
from gpu_pool.backends.tiny.sampling import choose

LARGEST_BATCH = 64
"""Rows that run together; more run one batch after another."""


class Embedded(NamedTuple):
    """A text's vector, and the number of its tokens."""

    values: list[float]
    tokens: int


@torch.inference_mode()
def embed(
    network: Network, device: torch.device, texts: Sequence[str], on_step: Callable[[], None], padding: Padding
) -> list[Embedded]:
    """A vector for each text, in order; `on_step` is called after each layer of each pass, `padding` counts the passes."""
    pieces = [(place, piece) for place, text in enumerate(texts) for piece in _pieces(text, network.shape.context)]
    sums = torch.zeros(len(texts), network.shape.width, dtype=torch.float64)
    counts = [0] * len(texts)
    for first in range(0, len(pieces), LARGEST_BATCH):
        part = pieces[first : first + LARGEST_BATCH]
        padding.passed([len(piece) for _, piece in part])
        for (place, piece), total in zip(
            part, _sums(network, device, [piece for _, piece in part], on_step), strict=True
        ):
            sums[place] += total
            counts[place] += len(piece)
    vectors = functional.normalize(sums, dim=-1)
    return [Embedded(values, count - 1) for values, count in zip(vectors.tolist(), counts, strict=True)]


def _pieces(text: str, context: int) -> list[list[int]]:
    tokens = model.encode(text, 4 * len(text))  # More than its bytes.
    return [tokens[start : start + context] for start in range(0, len(tokens), context)]


def _sums(network: Network, device: torch.device, pieces: Sequence[list[int]], on_step: Callable[[], None]) -> Tensor:
    """The sum of each piece's hidden states (pieces, width). Padding is behind a piece, where attention does not reach."""
    widest = max(map(len, pieces))
    padded = [piece + [model.PAD] * (widest - len(piece)) for piece in pieces]
    states = network.hidden(torch.tensor(padded, device=device), on_step).to("cpu", torch.float64)
    lengths = torch.tensor([len(piece) for piece in pieces]).unsqueeze(1)
    real = torch.arange(widest).unsqueeze(0) < lengths
    return (states * real.unsqueeze(-1)).sum(dim=1)


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
        for first in range(0, len(rows), LARGEST_BATCH):
            self._run(rows[first : first + LARGEST_BATCH], on_step or nothing)
        return [row.result() for row in rows]

    def embed(self, texts: Sequence[str], on_step: Callable[[], None] | None = None) -> list[Embedded]:
        """A vector for each text, in order, with the number of tokens that were read."""
        return embed(self._network, self._device, texts, on_step or nothing, self.padding)

    @torch.inference_mode()
    def _run(self, rows: list[TinySequence], on_step: Callable[[], None]) -> None:
        """Add tokens to all rows until each is finished."""
        slots = max(row.longest for row in rows)
        cache = Cache(self._network.shape, len(rows), slots, self._device)
        scores = self._read_prompts(rows, cache, on_step)
        while True:
            self._draw(rows, scores, on_step)
            for row in rows:
                row.stream()
            on_step()
            rows = _drop_finished(rows, cache, self._device)
            if not rows:
                return
            scores = self._read_last(rows, cache, on_step)

    def _read_prompts(self, rows: list[TinySequence], cache: Cache, on_step: Callable[[], None]) -> Tensor:
        lengths = [len(row.tokens) for row in rows]
        self.padding.passed(lengths)
        widest = max(lengths)
        tokens = [row.tokens + [model.PAD] * (widest - len(row.tokens)) for row in rows]
        positions = torch.arange(widest, device=self._device).expand(len(rows), widest)
        last = torch.tensor(lengths, device=self._device) - 1
        return self._network.step(
            torch.tensor(tokens, device=self._device), positions, widest, cache, last, on_layer=on_step
        )

    def _read_last(self, rows: list[TinySequence], cache: Cache, on_step: Callable[[], None]) -> Tensor:
        self.padding.stepped(sum(not row.finished for row in rows), len(rows))
        tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=self._device)
        positions = torch.tensor([[len(row.tokens) - 1] for row in rows], device=self._device)
        reach = max(len(row.tokens) for row in rows)
        return self._network.step(tokens, positions, reach, cache, torch.zeros_like(positions[:, 0]), on_layer=on_step)

    def _draw(self, rows: list[TinySequence], scores: Tensor, on_step: Callable[[], None]) -> None:
        """Choose each unfinished row's next token; a choice within rounding noise is recomputed from the row alone."""
        live = [index for index, row in enumerate(rows) if not row.finished]
        drawing = [rows[index] for index in live]
        tokens, clear = _choose(drawing, scores[live])
        for row, token, settled in zip(drawing, tokens, clear, strict=True):
            if not settled and row.repeatable:
                token = _choose([row], self._score_alone(row))[0][0]
                on_step()
            row.take(token)

    def _score_alone(self, row: TinySequence) -> Tensor:
        """Score the next token from the row's whole text, without cache or other rows: the same in every batch."""
        return cast("Tensor", self._network(torch.tensor([row.tokens], device=self._device)))[:, -1]


def _choose(rows: list[TinySequence], scores: Tensor) -> tuple[list[int], list[bool]]:
    wide = scores.to("cpu", torch.float64, copy=True)
    if not bool(wide.isfinite().all()):
        raise FloatingPointError("The network's scores are not finite.")  # Any choice would be meaningless.
    for index, row in enumerate(rows):
        wide[index, row.refused()] = -torch.inf
    parameters = [[row.parameters.temperature, row.parameters.top_p, row.next_uniform()] for row in rows]
    temperature, top_p, uniform = torch.tensor(parameters, dtype=torch.float64).unbind(1)
    choice = choose(wide, temperature, top_p, uniform)
    return choice.tokens, choice.clear


def _drop_finished(rows: list[TinySequence], cache: Cache, device: torch.device) -> list[TinySequence]:
    """Remove finished rows once they are half of the batch: each removal copies the cache."""
    staying = [index for index, row in enumerate(rows) if not row.finished]
    if staying and 2 * len(staying) > len(rows):
        return rows
    if staying:
        cache.keep(torch.tensor(staying, device=device))
    return [rows[index] for index in staying]
