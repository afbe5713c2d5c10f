"""Which tiers get the places of one batch. Pure.

The order is strictly by priority, with two guards that bound the wait of every admitted request: a guaranteed share for
each tier (kept as credit from batch to batch), and ageing (while a tier's oldest request has waited for `ageing_ms`, its
share is at least a twentieth). A larger share would invert the order after a loss of GPUs, when all lower tiers are late
and the highest must not wait for their backlog.
"""

from collections.abc import Mapping

from scheduler.batching.snapshot import TierQueue
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy

AGED_SHARE = 0.05
"""The minimum share of every batch for an aged tier, before the strict order."""


def choose(
    tiers: Mapping[str, TierQueue], policy: BatchPolicy, credit: Mapping[str, float]
) -> tuple[list[tuple[str, int]], dict[str, float]]:
    """Fill one batch. Returns (tier, places) in priority order, and the new credit.

    Guaranteed places come first, including those of aged tiers, then the strict order of priority. A tier's credit grows by
    its share of each batch while requests are queued in it, falls by the places it got, and never exceeds one batch.
    """
    size = policy.max_batch_size
    order = policy.order
    owed = {t.name: _owed(t, tiers, credit, policy) for t in order}
    places = dict.fromkeys(owed, 0)
    left = size
    guaranteed = {name: int(places + 1e-9) for name, places in owed.items()}
    for wanted in (guaranteed, {t.name: size for t in order}):
        for tier in order:
            depth = tiers[tier.name].depth if tier.name in tiers else 0
            more = min(left, wanted.get(tier.name, 0), depth - places[tier.name])
            places[tier.name] += more
            left -= more
    rest = {name: max(0.0, owed[name] - places[name]) for name in owed}
    return [(t.name, places[t.name]) for t in order if places[t.name]], rest


def _owed(tier: TierPolicy, tiers: Mapping[str, TierQueue], credit: Mapping[str, float], policy: BatchPolicy) -> float:
    waiting = tiers.get(tier.name)
    if waiting is None or not waiting.depth:
        return 0.0
    late = waiting.oldest_ms >= policy.ageing_ms
    share = max(tier.guaranteed_share, AGED_SHARE) if late else tier.guaranteed_share
    return min(float(policy.max_batch_size), credit.get(tier.name, 0.0) + share * policy.max_batch_size)
