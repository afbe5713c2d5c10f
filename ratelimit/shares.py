"""Shares of the capacity: guaranteed shares first, the rest by priority; unused shares are lent."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

REMEMBERED_S = 60.0
"""The time in which the remembered demand of a reduced tier decays to 1 / e."""


class TierShare(NamedTuple):
    """`priority` 1 is served first; `guaranteed_share` 0..1 of the capacity is guaranteed under contention."""

    name: str
    priority: int
    guaranteed_share: float


def allocate(capacity: float, tiers: Sequence[TierShare], demand: Mapping[str, float]) -> dict[str, float]:
    """The allocation of each tier, in the unit of `capacity`, which is finite.

    A tier gets its guarantee, up to its demand; the rest is allocated to the remaining demand by priority, so that an
    unused share is lent. No tier gets more than its demand, and the sum is at most the capacity. `demand` may be
    infinite; a missing tier has none. If guarantees exceed 100 %, that of the higher tier holds.
    """
    by_priority = sorted(tiers, key=lambda tier: tier.priority)
    # In this order, max also turns NaN into 0.
    wanted = {tier.name: max(0.0, demand.get(tier.name, 0.0)) for tier in by_priority}
    left = capacity = max(0.0, capacity)
    granted: dict[str, float] = {}
    for tier in by_priority:
        granted[tier.name] = min(wanted[tier.name], tier.guaranteed_share * capacity, left)
        left -= granted[tier.name]
    for name, rate in wanted.items():
        more = rate - granted[name]
        # A satisfied demand is exact: a rounding error would look like a reduced limit.
        granted[name] = rate if more <= left else min(rate, granted[name] + left)
        left = max(0.0, left - more)
    return granted


def ceilings(capacity: float, tiers: Sequence[TierShare], demand: Mapping[str, float]) -> dict[str, float]:
    """The allocation of each tier if its demand were infinite, with the current demand of the others.

    It limits a tier instead of its allocation: an idle tier has an allocation of 0, and must be able to start at once.
    Never below the allocation; the sum may exceed the capacity until the next observation.
    """
    return {tier.name: allocate(capacity, tiers, {**demand, tier.name: math.inf})[tier.name] for tier in tiers}


def share_in_part(share: float, of_tier: float, of_capacity: float) -> float:
    """The guaranteed share of a tier of a part of the capacity, 0..1, such that all parts together give it `share`.

    `of_tier`: the part of the tier's demand that is to be served there; `of_capacity`: the part of the capacity.
    """
    return min(1.0, share * of_tier / of_capacity) if of_capacity > 0 else share


class CapacityPart(NamedTuple):
    """The part of the capacity that serves a part of the demand: `part` 0..1, the guaranteed shares and the ceilings of tiers in it.

    `elsewhere`: what each tier gets for the rest of its demand.
    """

    part: float
    shares: Sequence[TierShare]
    rates: Mapping[str, float]
    elsewhere: Mapping[str, float]

    def ceiling(self, tier: str, whole: float) -> float:
        """What a tier may use here at most. `whole`: its ceiling for all of the capacity, of which the rest may be moved here."""
        return min(whole, max(self.rates[tier], whole - self.elsewhere[tier]))


def part_of_capacity(
    capacity: float,
    tiers: Sequence[TierShare],
    needs: Mapping[str, float],
    own: Mapping[str, float],
    demand: Mapping[str, float],
    *,
    least: float = 0.0,
) -> CapacityPart:
    """The part that follows from `own`, a part of the `needs` of each tier, and is at least `least`; all of it without needs.

    `demand`: the part of the demand. Rates and needs are in the unit of `capacity`.
    """
    granted = allocate(capacity, tiers, needs)
    parts = {name: own.get(name, 0.0) / needs[name] for name, rate in granted.items() if rate > 0}
    total = sum(granted.values())
    part = sum(granted[name] * of_tier for name, of_tier in parts.items()) / total if total > 0 else 1.0
    part = min(1.0, max(part, least))
    # A tier without needs here keeps its share, for the first request that comes.
    shares = [
        tier._replace(guaranteed_share=share_in_part(tier.guaranteed_share, parts.get(tier.name) or part, part))
        for tier in tiers
    ]
    elsewhere = {name: rate * (1.0 - parts.get(name, 0.0)) for name, rate in granted.items()}
    return CapacityPart(part, shares, ceilings(capacity * part, shares, demand), elsewhere)


def remembered(before: float, demand: float, factor: float, elapsed_s: float) -> float:
    """The demand of a tier before its limits were reduced, or the highest since then; it decays slowly, to `demand`.

    Clients that obey Retry-After send less under a reduced limit, so that their present demand is too low.
    """
    return demand if factor >= 1 else max(demand, before * math.exp(-max(0.0, elapsed_s) / REMEMBERED_S))


def factor(allocated: float, demand: float) -> float:
    """The factor on the base limits of a tier's customers: 1 if its demand is satisfied."""
    if demand <= 0 or allocated >= demand:
        return 1.0
    return max(0.0, allocated / demand)
