"""When a batch leaves, and with which requests: a pure function of a snapshot, without Redis, clock or await.

Late binding: no more batches are formed than the workers need ready, so that queued requests can still be overtaken. A full
batch leaves at once. A part batch leaves only for an idle worker: when it has the size that the load requires (`target_size`),
when its window is over, or when waiting would add less than one request. `tier_shares` has the order of requests.

Background work gets places in these batches (`background`), and batches of its own for workers that would be idle. Such a
batch is formed only when a worker is idle, never ahead: so background work gives way within one batch. Runs begin at
nearly even intervals, so that one soon ends.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from scheduler.batching.background import (
    BACKGROUND,
    MOST_AHEAD,
    add_background,
    background_credit,
    free_places,
    oldest_background,
    spread_ms,
)
from scheduler.batching.decision import Decision, Waits
from scheduler.batching.distances import distance_ms, part_distance_ms, since_due_ms
from scheduler.batching.snapshot import PoolSnapshot, TierQueue
from scheduler.batching.target_size import target_size, window_ms
from scheduler.batching.tier_policy import BatchPolicy
from scheduler.batching.tier_shares import choose
from scheduler.protocol.wake_condition import FIRST_IDLE, NEVER, WakeCondition
from scheduler.states import background_of

MOST_AT_ONCE = 8
"""Batches planned from one snapshot; requests that arrive meanwhile may be more urgent than the rest."""


def ready_limit(workers: int, per_workers: int, distance: float) -> int:
    """The number of batches that may be ready: one for each `per_workers` workers, and at least one.

    Idle workers need no more, because each claims a ready batch at once. `distance`: ms between two batches, 0 for none. With one,
    half as many may be ready: a worker is nearly always free then, and batches stay ready only if the pool is slower than
    known, as before lost workers are noticed. New requests would wait for all of them.
    """
    return max(1, math.ceil(workers / (2 * per_workers if distance else per_workers)))


def decide(snapshot: PoolSnapshot, policy: BatchPolicy, credit: Mapping[str, float]) -> Decision:
    """Decide whether a batch should leave now, and with which requests.

    `credit`: the guaranteed places that earlier batches still owe to each tier; the decision has the new values.
    """
    distance = distance_ms(snapshot.workers, snapshot.service, policy.max_batch_size, policy.headroom)
    limit = ready_limit(snapshot.workers, policy.lookahead_workers, distance)
    waits = _waits(snapshot, policy, limit, distance)
    if waits is not None:
        decision = Decision((), waits.wait_ms, waits.condition, limit, credit, snapshot.since_ms, waits.pace_ms)
        return _beside_background(snapshot, policy, decision)
    return _leaves(snapshot, policy, limit, credit)


def _leaves(snapshot: PoolSnapshot, policy: BatchPolicy, limit: int, credit: Mapping[str, float]) -> Decision:
    """A batch of interactive requests, with background work if some waits."""
    distance = distance_ms(snapshot.workers, snapshot.service, policy.max_batch_size, policy.headroom)
    picks, owed = choose(snapshot.tiers, policy, credit)
    if snapshot.in_background:
        owed[BACKGROUND] = credit.get(BACKGROUND, 0.0)
        picks, owed = add_background(picks, owed, snapshot, policy)
        distance = max(distance, spread_ms(snapshot, policy))
    # An idle worker may be about to claim the ready batch: allow one more for it.
    most_ready = limit + bool(snapshot.idle) + _has_quiet(snapshot, policy)
    return Decision(picks, None, NEVER, most_ready, owed, since_due_ms(snapshot.since_ms, distance))


def _beside_background(snapshot: PoolSnapshot, policy: BatchPolicy, waits: Decision) -> Decision:
    """The decision while no interactive batch is due: `waits`, unless background work waits and a worker is idle.

    Interactive requests that gather leave at once if background work fills their batch without noticeable time. Otherwise one
    idle worker is kept for them, and background work gets the others.
    """
    if not snapshot.in_background or not snapshot.workers:
        return waits
    woken = replace(waits, condition=replace(waits.condition, ready=max(0, waits.condition.ready)), pace_ms=math.inf)
    size, waiting = policy.max_batch_size, snapshot.waiting
    are_ready = waiting and snapshot.ready_batches >= waits.ready_limit + snapshot.idle
    if not snapshot.idle or waiting >= size or are_ready:
        return woken
    if waiting and waiting + min(snapshot.in_background, free_places(snapshot.service, size)) >= size:
        return _leaves(snapshot, policy, waits.ready_limit, waits.credit)
    if waiting and snapshot.idle == 1:
        return woken
    spread = spread_ms(snapshot, policy)
    if snapshot.since_ms < spread:
        left_ms = spread - snapshot.since_ms
        return replace(woken, wait_ms=left_ms if woken.wait_ms is None else min(left_ms, woken.wait_ms))
    picks = oldest_background(snapshot, policy, size)
    owed = background_credit(waits.credit, policy) - sum(count for _, count in picks)
    return replace(
        waits,
        picks=picks,
        wait_ms=None,
        condition=NEVER,
        ready_limit=snapshot.ready_batches + snapshot.idle,
        credit={**waits.credit, BACKGROUND: max(-MOST_AHEAD * size, owed)},
        since_ms=since_due_ms(snapshot.since_ms, spread),
    )


def plan(snapshot: PoolSnapshot, policy: BatchPolicy, credit: Mapping[str, float]) -> list[Decision]:
    """The decision for now and, if a batch leaves, the next decisions as long as they form batches too.

    Requests arrive in bursts. With one call after another, the last batch of a burst would wait for all the others.
    """
    decisions = [decide(snapshot, policy, credit)]
    while decisions[-1].picks and len(decisions) < MOST_AT_ONCE:
        decision, taken = decisions[-1], dict(decisions[-1].picks)
        # The age of the oldest request is not known after the batch is formed, and taken as unchanged.
        snapshot = replace(
            snapshot,
            tiers={
                name: TierQueue(tier.depth - taken.get(name, 0), tier.oldest_ms)
                for name, tier in snapshot.tiers.items()
            },
            background={
                name: TierQueue(tier.depth - taken.get(background_of(name), 0), tier.oldest_ms)
                for name, tier in snapshot.background.items()
            },
            ready_batches=snapshot.ready_batches + 1,
            leased_batches=snapshot.leased_batches + 1,
            since_ms=decision.since_ms,
            since_formed_ms=0.0,
            quiet=(),
        )
        following = decide(snapshot, policy, decision.credit)
        if not following.picks or snapshot.ready_batches >= following.ready_limit:
            break
        decisions.append(following)
    return decisions


def _waits(snapshot: PoolSnapshot, policy: BatchPolicy, limit: int, distance: float) -> Waits | None:
    """None if a batch leaves now."""
    if snapshot.waiting and not snapshot.workers:
        return Waits(None, NEVER)
    quiet = _has_quiet(snapshot, policy)
    if snapshot.waiting and snapshot.ready_batches >= limit + snapshot.idle + quiet:
        return Waits(None, WakeCondition(0, limit if quiet else limit // 2))
    saturated = snapshot.waiting >= policy.max_batch_size * (snapshot.idle + 1)
    if saturated and not quiet and snapshot.since_ms < distance:
        return Waits(distance - snapshot.since_ms, WakeCondition(0, limit // 2))
    if quiet or snapshot.waiting >= policy.max_batch_size:
        return None
    if snapshot.waiting and not snapshot.idle:
        return Waits(None, WakeCondition(policy.max_batch_size, FIRST_IDLE), _pace_ms(snapshot, policy, 1) or math.inf)
    return _gathers(snapshot, policy)


def _has_quiet(snapshot: PoolSnapshot, policy: BatchPolicy) -> bool:
    """Whether the highest tier that waits has requests of quiet customers. Their batch leaves before those that are ready, so one
    more is formed for them.
    """
    waiting = (tier.name for tier in policy.order if tier.name in snapshot.tiers and snapshot.tiers[tier.name].depth)
    return next(waiting, None) in snapshot.quiet


def _gathers(snapshot: PoolSnapshot, policy: BatchPolicy) -> Waits | None:
    """As `_waits`, for an idle worker and less than a full batch."""
    rate = snapshot.arrivals_per_s
    nothing_runs = not snapshot.leased_batches  # No response is pending that would cause another request.
    if snapshot.waiting and nothing_runs:
        return None
    target = target_size(rate, snapshot.workers, snapshot.service, policy.max_batch_size)
    longest_ms = window_ms(target, rate, policy.max_wait_ms)
    if pace_ms := _pace_ms(snapshot, policy, snapshot.idle):
        if pace_ms - snapshot.since_formed_ms >= 1:
            return Waits(pace_ms - snapshot.since_formed_ms, WakeCondition(policy.max_batch_size, FIRST_IDLE), pace_ms)
        if snapshot.waiting:
            return None
    if not snapshot.waiting:
        return Waits(longest_ms or None, WakeCondition(target))
    left_ms = longest_ms - snapshot.oldest_ms
    if snapshot.waiting >= target or left_ms <= 0 or rate * left_ms < 1000:
        return None
    return Waits(left_ms, WakeCondition(target, FIRST_IDLE), left_ms)


def _pace_ms(snapshot: PoolSnapshot, policy: BatchPolicy, idle: int) -> float:
    """The time between two part batches while so many workers are idle; 0: they have no distances.

    It ends when the target is expected, not when it is reached: batches have that size on average, at even distances.
    """
    rate, service = snapshot.arrivals_per_s, snapshot.service
    distance = part_distance_ms(snapshot.workers, idle, service, max(1, snapshot.waiting), rate)
    if not distance or not policy.headroom:
        return 0.0
    target = target_size(rate, snapshot.workers, service, policy.max_batch_size)
    return max(distance, min(1000 * target / rate, window_ms(target, rate, policy.max_wait_ms)))
