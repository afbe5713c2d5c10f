"""Shares: who may use how much of the capacity. Guaranteed shares first, the rest by priority, what is unused is lent."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class TierShare(NamedTuple):
    """A tier's claim: `priority` 1 is served first; `guaranteed_share` 0..1 of the capacity holds under contention."""

    name: str
    priority: int
    guaranteed_share: float


def allocate(capacity: float, tiers: Sequence[TierShare], demand: Mapping[str, float]) -> dict[str, float]:
    """What each tier gets of what it asks for, in the unit of `capacity`, which is finite.

    A tier gets its guarantee as far as it asks for it; then tiers get what they still ask for, in order of priority: so
    a share that is not used is lent to who asks. No tier gets more than it asks for, and together they get no more than
    the capacity; what nobody asks for is in nobody's part. `demand` may be infinite; a tier that is not in it asks for
    nothing. Where guarantees add up to more than the whole, the higher tier's holds.
    """
    by_priority = sorted(tiers, key=lambda tier: tier.priority)
    # In this order, max also turns a rate that is not a number into 0.
    asked = {tier.name: max(0.0, demand.get(tier.name, 0.0)) for tier in by_priority}
    left = capacity = max(0.0, capacity)
    granted: dict[str, float] = {}
    for tier in by_priority:
        granted[tier.name] = min(asked[tier.name], tier.guaranteed_share * capacity, left)
        left -= granted[tier.name]
    for name, wanted in asked.items():
        more = wanted - granted[name]
        # Who gets all gets exactly what it asked for: a rounding error would look like a lowered limit.
        granted[name] = wanted if more <= left else min(wanted, granted[name] + left)
        left = max(0.0, left - more)
    return granted


def ceilings(capacity: float, tiers: Sequence[TierShare], demand: Mapping[str, float]) -> dict[str, float]:
    """What each tier would get if it asked for everything, while the others ask for what they ask for now.

    This bounds a tier, and not its allocation: an idle tier's allocation is 0, and it must be able to begin at once.
    Never less than the allocation; together they may be more than the capacity until the next look.
    """
    return {tier.name: allocate(capacity, tiers, {**demand, tier.name: math.inf})[tier.name] for tier in tiers}


def factor(allocated: float, demand: float) -> float:
    """The part of its base limits that each customer of a tier keeps: 1 while the tier gets all it asks for."""
    if demand <= 0 or allocated >= demand:
        return 1.0
    return max(0.0, allocated / demand)
