"""Which requests get the free slots of a pool whose workers start and end requests one by one. Pure, as `policy`.

A free slot is filled at that moment: nothing gathers, and nothing is formed ahead. The order is that of batches: strictly by
priority, after guaranteed shares and ageing. In a pool without free slots, a few are kept for the highest tier, so that its
requests do not wait for the end of others. Background work is the lowest tier, with its share.
"""

from collections.abc import Mapping
from dataclasses import replace

from scheduler.batching.decision import Decision
from scheduler.batching.snapshot import PoolSnapshot, TierQueue
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy
from scheduler.batching.tier_shares import choose
from scheduler.protocol.pool_view import SlotView
from scheduler.protocol.wake_condition import FREE_SLOT, NEVER, WakeCondition
from scheduler.states import background_of

MOST_KEPT_FREE = 2
"""Slots kept free for the highest tier. A full engine ends a request every few milliseconds, so more would only stay empty."""

MOST_AT_ONCE = 8
"""Batches planned from one snapshot, as in `policy`."""

_LAST = 1_000_000


def kept_free(slots: SlotView, policy: BatchPolicy) -> int:
    """Slots that lower tiers leave free: the headroom, at most MOST_KEPT_FREE; none in a pool of a few slots."""
    return min(MOST_KEPT_FREE, int(policy.headroom * slots.total))


def fill(snapshot: PoolSnapshot, policy: BatchPolicy, credit: Mapping[str, float]) -> list[Decision]:
    """The batches to form now, one for each worker's free slots; the last decision says what to wait for if none is left."""
    decisions: list[Decision] = []
    slots, names = snapshot.slots, [tier.name for tier in policy.order]
    if slots is None:
        raise ValueError("the pool has no slots; this is a bug")
    # A paused tier is not in the policy. Background work does not age: it may wait for minutes.
    tiers = {name: queue for name, queue in snapshot.tiers.items() if name in names}
    tiers |= {background_of(name): TierQueue(q.depth, 0.0) for name, q in snapshot.background.items() if name in names}
    # Background queues are the lowest tiers; the first one with work gets their share.
    queues = [background_of(name) for name in names]
    first = next((name for name in queues if name in tiers and tiers[name].depth), None)
    shares = [policy.background_share if name == first else 0.0 for name in queues]
    background = [
        TierPolicy(name, _LAST + at, share) for at, (name, share) in enumerate(zip(queues, shares, strict=True))
    ]
    policy = replace(policy, tiers=[*policy.tiers, *background])
    while len(decisions) < MOST_AT_ONCE:
        picks, credit = _picks(tiers, slots, policy, credit)
        if not picks:
            break
        decisions.append(Decision(picks, None, NEVER, _LAST, credit))
        taken = dict(picks)
        tiers = {name: replace(tier, depth=tier.depth - taken.get(name, 0)) for name, tier in tiers.items()}
        slots = SlotView(slots.free - sum(taken.values()), slots.total, slots.fewest)
    if decisions:
        return decisions
    waiting = sum(tier.depth for tier in tiers.values())
    # Requests of the highest tier may use what is kept free, or have others withdrawn, so each arrival must wake.
    condition = WakeCondition(1, FREE_SLOT) if waiting else WakeCondition(1)
    return [Decision((), None, condition, _LAST, credit)]


def _picks(
    tiers: Mapping[str, TierQueue], slots: SlotView, policy: BatchPolicy, credit: Mapping[str, float]
) -> tuple[list[tuple[str, int]], Mapping[str, float]]:
    """The next batch, which one worker may claim, and the credit afterwards; the credit is unchanged without a batch."""
    free = min(slots.free, slots.fewest)
    if free <= 0 or not policy.tiers:
        return [], credit
    highest = policy.order[0].name
    first = tiers[highest].depth if highest in tiers else 0
    below = max(0, min(free, slots.free - kept_free(slots, policy)))
    if first >= free or below > first:
        size = free if first >= free else below
        picks, owed = choose(tiers, replace(policy, max_batch_size=size), credit)
        return (picks, owed) if picks else ([], credit)
    return [(highest, first)] if first else [], credit
