"""Tiers that were renamed or deleted a moment ago."""

from collections.abc import Callable
from dataclasses import replace

from scheduler.batching.tier_policy import BatchPolicy, TierPolicy

LEAVING_S = 600.0


class LeavingTiers:
    """Tiers that were renamed or deleted a moment ago, in their old place but without a share.

    A gateway may hear of it later than we do, or be cut off from PostgreSQL for a while: what it still lets in under the
    old name, and requests queued already, would otherwise stay in an unserved queue until their deadline.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._known: dict[str, tuple[float, TierPolicy]] = {}

    def kept(self, policy: BatchPolicy) -> BatchPolicy:
        """The policy, and those that were in one within the last ten minutes."""
        now, names = self._clock_s(), {tier.name for tier in policy.tiers}
        self._known |= {tier.name: (now + LEAVING_S, tier) for tier in policy.tiers}
        if len(self._known) == len(names):
            return policy
        self._known = {name: known for name, known in self._known.items() if now < known[0]}
        left = [replace(tier, guaranteed_share=0.0) for name, (_, tier) in self._known.items() if name not in names]
        return replace(policy, tiers=(*policy.tiers, *left))
