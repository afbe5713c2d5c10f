"""The mix of tiers: their shares of the requests."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


class MixError(ValueError):
    """A mix that cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class Mix:
    """Tiers and their shares, which sum to 1, in the order given."""

    tiers: tuple[str, ...]
    shares: tuple[float, ...]

    def cumulative(self) -> tuple[float, ...]:
        """The upper ends of the tiers' ranges within 0..1, the last one left out."""
        return tuple(accumulate(self.shares))[:-1]


def tier_at(bounds: Sequence[float], point: float) -> int:
    """Which tier a point in 0..1 falls to, given `Mix.cumulative()`."""
    return bisect_right(bounds, point)


def parse_mix(text: str) -> Mix:
    """Read a mix; weights need not sum to 1. Raises MixError, which names the part at fault."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        tier, equals, value = (piece.strip() for piece in part.partition("="))
        if not tier or not equals:
            raise MixError(f"each part must be TIER=WEIGHT, got {part.strip()!r}")
        if tier in weights:
            raise MixError(f"the tier {tier!r} is there twice")
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not (weight >= 0 and math.isfinite(weight)):
            raise MixError(f"the weight of {tier!r} must be a number of 0 or more, got {value!r}")
        weights[tier] = weight
    # A tier of weight nothing is left out, so that nobody needs a key for it.
    kept = {tier: weight for tier, weight in weights.items() if weight}
    total = sum(kept.values())
    if not total:
        raise MixError("at least one tier must have a weight above 0")
    # Rounded, because 0.3 should be told as 0.3.
    return Mix(tuple(kept), tuple(round(weight / total, 12) for weight in kept.values()))
