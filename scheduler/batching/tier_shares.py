"""Which tiers get the places of one batch. Pure.

The order is strictly by priority, with two guards that bound the wait of every admitted request: a guaranteed share for
each tier (kept as credit from batch to batch), and ageing (while a tier's oldest request has waited for `ageing_ms`, its
share is at least a twentieth). A larger share would invert the order after a loss of GPUs, when all lower tiers are late
and the highest must not wait for their backlog.
"""

from collections.abc import Mapping

from scheduler.batching.snapshot import TierQueue
from scheduler.batching.tier_policy import BatchPolicy

AGED_SHARE = 0.05
"""The minimum share of every batch for an aged tier, before the strict order."""


def choose(
    tiers: Mapping[str, TierQueue], policy: BatchPolicy, credit: Mapping[str, float]
) -> tuple[list[tuple[str, int]], dict[str, float]]:
    """Fill one batch. Returns (tier, places) in priority order, and the new credit.

    Guaranteed places come first, including those of aged tiers, then the strict order of priority. A tier's credit grows by
    its share of each batch while requests are queued in it, falls by the places it got, and never exceeds one batch.
    """
    size, order = policy.max_batch_size, policy.order
    owed: dict[str, float] = {}
    for tier in order:
        waiting, share, owed[tier.name] = tiers.get(tier.name), tier.guaranteed_share, 0.0
        if waiting is not None and waiting.depth:
            if waiting.oldest_ms >= policy.ageing_ms:
                share = max(share, AGED_SHARE)
            owed[tier.name] = min(float(size), credit.get(tier.name, 0.0) + share * size)
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
