"""A sentence-embedding model: each text becomes one vector of length one, so that a dot product is a likeness.

The states of a text's tokens are put into one by the pooling that the directory names. Texts of like length run
together, since padding costs as much as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_pool.backend import InvalidOutput, Item, ItemResult
from gpu_pool.hf.sentence_layout import Pooling, SentenceLayout
from scheduler.errors import ErrorCode
from scheduler.vectors import write_vector

LARGEST_BATCH = 64
"""Texts that run together; more are done in turns."""

NO_TEXTS = ItemResult("This model makes embeddings alone, no texts.", 0, ErrorCode.INVALID_REQUEST)


class EmbeddingModel:
    """The loaded model. `longest`: the most tokens of a text that it reads; what is over them is left out."""

    def __init__(
        self, network: Any, tokenizer: Any, device: torch.device, layout: SentenceLayout, longest: int
    ) -> None:
        self._network = network
        self._tokenizer = tokenizer
        self._device = device
        self._layout = layout
        self._longest = longest

    def texts(self, items: Sequence[Item], _progress: Callable[[], None]) -> list[ItemResult]:
        """There is nothing that could write."""
        return [NO_TEXTS] * len(items)

    def vectors(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """A vector for each item. Raises InvalidOutput where the network computes what is no number."""
        order = sorted(range(len(items)), key=lambda place: len(items[place].input))
        results: dict[int, ItemResult] = {}
        for first in range(0, len(order), LARGEST_BATCH):
            places = order[first : first + LARGEST_BATCH]
            made = self._embed([items[place].input for place in places])
            results.update(zip(places, made, strict=True))
            progress()
        return [results[place] for place in range(len(items))]

    def warmup(self) -> None:
        """Embed two texts of different lengths."""
        self._embed(["The", "Once upon a time"])

    @torch.inference_mode()
    def _embed(self, texts: Sequence[str]) -> list[ItemResult]:
        inputs = self._tokenizer(
            [self._readable(text) for text in texts],
            padding=True,
            truncation=True,
            max_length=self._longest,
            return_tensors="pt",
        ).to(self._device)
        states = self._network(**inputs).last_hidden_state
        vectors = functional.normalize(pool(states.float(), inputs["attention_mask"], self._layout.pooling), dim=-1)
        if not bool(vectors.isfinite().all()):
            raise InvalidOutput("The network's states are not finite.")
        counts = inputs["attention_mask"].sum(dim=1).tolist()
        return [ItemResult(write_vector(v), n) for v, n in zip(vectors.tolist(), counts, strict=True)]

    def _readable(self, text: str) -> str:
        whole = text.encode("utf-8", errors="replace").decode()  # The tokenizer takes no lone surrogates.
        return whole.lower() if self._layout.lower_case else whole


def pool(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """One vector (rows, width) out of the states (rows, tokens, width); padding, where `mask` is 0, counts for nothing."""
    if pooling == "cls":
        return states[:, 0]
    real = mask.unsqueeze(-1).to(states.dtype)
    return (states * real).sum(dim=1) / real.sum(dim=1).clamp(min=1.0)
