"""The places of jobs and batch lines, which wait in the background queues, in batches. Pure.

They get places that cost no time, and a share of every batch.
"""

from collections.abc import Mapping, Sequence

from scheduler.batching.service import Service
from scheduler.batching.snapshot import PoolSnapshot
from scheduler.batching.tier_policy import BatchPolicy
from scheduler.states import background_of

SPREAD = 0.97
"""Runs of a pool that background work fills begin at intervals of at least this part of the even one. Workers that started
together would otherwise also end together, and an interactive request would wait for the rest of a run; at the whole
interval, workers would wait for each other."""

BACKGROUND = ""
"""The name of the credit of background work: negative after it got more than its share."""

MOST_AHEAD = 4.0
"""Batches that background work may have got more than its share, for which it gets no share later."""

UNNOTICED = 0.05
"""The part of a batch's duration that free places may add."""


def spread_ms(snapshot: PoolSnapshot, policy: BatchPolicy) -> float:
    """The least time between the starts of two runs."""
    service = snapshot.service
    return SPREAD * (service.base_ms + policy.max_batch_size * service.item_ms) / snapshot.workers


def add_background(
    picks: Sequence[tuple[str, int]], owed: Mapping[str, float], snapshot: PoolSnapshot, policy: BatchPolicy
) -> tuple[list[tuple[str, int]], dict[str, float]]:
    """The picks of a batch with background work: its share, of the places of the lowest tiers if the batch is full, and places
    that are left and add no noticeable time.
    """
    size = policy.max_batch_size
    share = background_credit(owed, policy)
    guaranteed = min(max(0, int(share + 1e-9)), snapshot.in_background)
    left, kept = size - guaranteed, list[tuple[str, int]]()
    for name, count in picks:
        if places := min(count, left):
            kept.append((name, places))
            left -= places
    free = min(left, free_places(snapshot.service, size))
    background = oldest_background(snapshot, policy, guaranteed + free)
    left_share = share - sum(count for _, count in background)
    return [*kept, *background], {**owed, BACKGROUND: max(-MOST_AHEAD * size, left_share)}


def background_credit(credit: Mapping[str, float], policy: BatchPolicy) -> float:
    """The places that are owed to background work in the next batch."""
    size = policy.max_batch_size
    return min(float(size), credit.get(BACKGROUND, 0.0) + policy.background_share * size)


def free_places(service: Service, size: int) -> int:
    """How many more requests add at most UNNOTICED to the duration of a batch; none before its duration is known."""
    if not service.base_ms:
        return 0
    return size if service.item_ms <= 0 else int(UNNOTICED * service.base_ms / service.item_ms)


def oldest_background(snapshot: PoolSnapshot, policy: BatchPolicy, count: int) -> list[tuple[str, int]]:
    """Up to `count` requests of the background queues, strictly by priority."""
    picks = []
    for tier in policy.order:
        depth = snapshot.background[tier.name].depth if tier.name in snapshot.background else 0
        if places := min(count, depth):
            picks.append((background_of(tier.name), places))
            count -= places
    return picks
