"""Shares: who may use how much of the capacity. Guaranteed shares first, the rest by priority, what is unused is lent."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class TierShare(NamedTuple):
    """A tier's claim: `priority` 1 is served first; `guaranteed_share` 0..1 of the capacity holds under contention."""

    name: str
    priority: int
    guaranteed_share: float


def allocate(capacity: float, tiers: Sequence[TierShare], demand: Mapping[str, float]) -> dict[str, float]:
    """The rate each tier may use now, in the unit of `capacity`; the sum over tiers of what they use never exceeds it.

    A tier is served its guarantee (as far as it asks for it), then tiers are served what they still ask for in order of
    priority. What nobody asks for is lent: it is added to every tier's allowance, since a tier whose demand grows must
    be able to show it, and the bucket and the next allocation, a moment later, bound what that can cost.
    """
    granted = {t.name: min(demand.get(t.name, 0.0), t.guaranteed_share * capacity) for t in tiers}
    left = max(0.0, capacity - sum(granted.values()))
    for tier in sorted(tiers, key=lambda t: t.priority):
        more = min(left, demand.get(tier.name, 0.0) - granted[tier.name])
        granted[tier.name] += more
        left -= more
    return {name: rate + left for name, rate in granted.items()}


def factor(allocated: float, demand: float) -> float:
    """The part of its base limit that each key of a tier keeps: 1 while the tier gets all it asks for."""
    if demand <= 0 or allocated >= demand:
        return 1.0
    return max(0.0, allocated / demand)
