"""What `tiny` makes of a text where a vector is wanted: the mean of its last hidden states, at length one.

Until a real embedding model is plugged in. A text longer than the context is read in pieces, which count by their length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gpu_pool.backends.tiny.model import Network
from gpu_pool.padding import Padding
from gpu_pool.tiny import vocabulary

LARGEST_BATCH = 64
"""Pieces that run together; more are done in turns."""


class Embedded(NamedTuple):
    """A text's vector (width of the network), and the tokens that were read for it."""

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
    tokens = vocabulary.encode(text, 4 * len(text))  # More bytes than it has.
    return [tokens[start : start + context] for start in range(0, len(tokens), context)]


def _sums(network: Network, device: torch.device, pieces: Sequence[list[int]], on_step: Callable[[], None]) -> Tensor:
    """The sum of each piece's hidden states (pieces, width). Padding stands behind a piece, where nothing looks at it."""
    widest = max(map(len, pieces))
    padded = [piece + [vocabulary.PAD] * (widest - len(piece)) for piece in pieces]
    states = network.hidden(torch.tensor(padded, device=device), on_step).to("cpu", torch.float64)
    lengths = torch.tensor([len(piece) for piece in pieces]).unsqueeze(1)
    real = torch.arange(widest).unsqueeze(0) < lengths
    return (states * real.unsqueeze(-1)).sum(dim=1)
