"""The rules by which values of a figure are merged: those of several pools, cells, or times, in this order."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class WeightedMean(NamedTuple):
    """The rule of a share: the mean, weighted by another field of the same document."""

    by: str

    def __call__(self, values: Sequence[float], weights: Sequence[int]) -> float:
        total_weight = sum(weights)
        weighted = sum(value * weight for value, weight in zip(values, weights, strict=True))
        return round(weighted / total_weight, 4) if total_weight else 0.0


def total(values: Sequence[float]) -> float:
    """The sum, rounded to 3 digits."""
    return round(sum(values), 3)


def highest(values: Sequence[Any]) -> Any:
    """The highest of the known values; None without any."""
    return max((value for value in values if value is not None), default=None)


def mean(values: Sequence[float]) -> float:
    """The mean, rounded to 3 digits."""
    return round(sum(values) / len(values), 3)
