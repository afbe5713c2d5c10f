"""A sentence-embedding model: each text becomes one vector of length one, so that a dot product is the similarity.

The states of a text's tokens are combined by the directory's pooling. Texts of similar length run together, since
padding costs as much as text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_pool.backends.backend import TOO_LATE, InvalidOutput, Item, ItemResult
from gpu_pool.backends.hf.sentence_layout import Pooling, SentenceLayout
from gpu_pool.backends.stepping import RowLoop
from scheduler.errors import ErrorCode
from scheduler.vectors import write_vector

MOST_TOKENS = 8192
"""Tokens, padding included, that run together; more run in several passes, which shows progress and limits the memory.
"""

NO_TEXTS = ItemResult("This model makes embeddings alone, no texts.", 0, ErrorCode.INVALID_REQUEST)


class EmbeddingModel:
    """The loaded model. `longest`: the most tokens of a text; the rest is ignored."""

    context_tokens = 0  # A longer text is cut.

    def __init__(
        self,
        network: Any,
        tokenizer: Any,
        device: torch.device,
        layout: SentenceLayout,
        longest: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network = network
        self._tokenizer = tokenizer
        self._device = device
        self._layout = layout
        self._longest = longest
        self._clock = clock

    def loop(self) -> RowLoop[Any] | None:
        """None: a vector takes one pass, and texts of one length in one pass save padding, so batches are better."""
        return None

    def texts(self, items: Sequence[Item], _progress: Callable[[], None]) -> list[ItemResult]:
        """Rejected: the model generates no text."""
        return [NO_TEXTS] * len(items)

    def vectors(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """A vector for each item that is in time. Raises InvalidOutput if the network computes NaN or infinity."""
        read = self._read([item.input for item in items])
        results = [TOO_LATE] * len(items)
        for one_pass in plan_passes([len(tokens) for tokens in read], MOST_TOKENS):
            now = self._clock()
            places = [place for place in one_pass if now < items[place].until]
            embedded = self._embed([read[place] for place in places]) if places else []
            for place, result in zip(places, embedded, strict=True):
                results[place] = result
            progress()
        return results

    def warmup(self) -> None:
        """Embed two texts of different lengths."""
        self._embed(self._read(["The", "Once upon a time"]))

    def _read(self, texts: Sequence[str]) -> list[list[int]]:
        readable = [text.encode("utf-8", errors="replace").decode() for text in texts]  # Without lone surrogates.
        if self._layout.lower_case:
            readable = [text.lower() for text in readable]
        read: list[list[int]] = self._tokenizer(readable, truncation=True, max_length=self._longest)["input_ids"]
        return read

    @torch.inference_mode()
    def _embed(self, read: Sequence[list[int]]) -> list[ItemResult]:
        widest = max(map(len, read))
        padding = self._tokenizer.pad_token_id or 0
        ids = torch.tensor([tokens + [padding] * (widest - len(tokens)) for tokens in read], device=self._device)
        lengths = torch.tensor([len(tokens) for tokens in read], device=self._device)
        mask = (torch.arange(widest, device=self._device) < lengths.unsqueeze(1)).long()
        states = self._network(input_ids=ids, attention_mask=mask).last_hidden_state
        vectors = functional.normalize(pool(states.float(), mask, self._layout.pooling), dim=-1)
        if not bool(vectors.isfinite().all()):
            raise InvalidOutput("The network's states are not finite.")
        return [ItemResult(write_vector(v), len(tokens)) for v, tokens in zip(vectors.tolist(), read, strict=True)]


def plan_passes(lengths: Sequence[int], most: int) -> list[list[int]]:
    """The positions of texts that run together, the shortest first: padded to the longest, they have at most `most`
    tokens.

    A text longer than that runs alone.
    """
    passes: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if passes and (len(passes[-1]) + 1) * lengths[place] <= most:
            passes[-1].append(place)
        else:
            passes.append([place])
    return passes


def pool(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """One vector (rows, width) from the states (rows, tokens, width); padding, where `mask` is 0, is ignored."""
    if pooling == "cls":
        return states[:, 0]
    real = mask.unsqueeze(-1).to(states.dtype)
    return (states * real).sum(dim=1) / real.sum(dim=1).clamp(min=1.0)
