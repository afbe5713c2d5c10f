"""Which runs are withdrawn when all slots are taken and the highest tier waits. Pure.

A run that has sent nothing may be withdrawn: it returns to the head of its queue, without an attempt and without a charge, at
most once. This happens only if a request of the highest tier would otherwise wait longer than its objective: the wait for a
slot is the mean time in a slot, divided by the slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.batching.snapshot import PoolSnapshot
from scheduler.batching.tier_policy import BatchPolicy
from scheduler.states import background_of

OBJECTIVE_MS = 500.0
"""The longest wait of the highest tier for a slot, unless `slo_ms` of the tier is shorter."""

PAUSE_MS = 100.0
"""Time after a withdrawal until the next one: by then its slots are free and filled."""


class Withdrawal(NamedTuple):
    """Withdraw so many `runs` of the first of `queues` that has some. With none: decide again after `wait_ms`."""

    runs: int
    queues: Sequence[str]
    wait_ms: float


def withdrawal(snapshot: PoolSnapshot, policy: BatchPolicy, since_ms: float) -> Withdrawal | None:
    """The runs to withdraw now; None if the highest tier does not wait. `since_ms`: time since the last withdrawal."""
    if not policy.tiers or snapshot.slots is None or snapshot.slots.free or not snapshot.slots.total:
        return None
    highest, *others = policy.order
    waiting = snapshot.tiers.get(highest.name)
    if waiting is None or not waiting.depth:
        return None
    left_ms = min(OBJECTIVE_MS, highest.slo_ms or OBJECTIVE_MS) - waiting.oldest_ms
    slot_ms = snapshot.service.base_ms / snapshot.slots.total
    in_time = 0 if left_ms <= 0 else int(left_ms / slot_ms) if slot_ms > 0 else waiting.depth
    late = waiting.depth - in_time
    queues = [*(background_of(tier.name) for tier in reversed(policy.order)), *(tier.name for tier in reversed(others))]
    if late <= 0:
        return Withdrawal(0, queues, max(PAUSE_MS, left_ms))
    if since_ms < PAUSE_MS:
        return Withdrawal(0, queues, PAUSE_MS - since_ms)
    return Withdrawal(late, queues, PAUSE_MS)
