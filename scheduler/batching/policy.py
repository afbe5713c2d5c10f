"""When a batch leaves, and with which requests: a pure function of a snapshot, without Redis, clock or await.

Late binding: no more batches are formed than the workers need ready, so that queued requests can still be overtaken. A full
batch leaves at once. A part batch leaves only for an idle worker: when it has the size that the load requires (`timing`),
when its window is over, or when waiting would add less than one request. The order is strictly by priority, with two
guards that bound the wait of every admitted request: a guaranteed share for each tier (kept as credit from batch to batch),
and ageing (while a tier's oldest request has waited for `ageing_ms`, its share is at least a twentieth). A larger share
would invert the order after a loss of GPUs, when all lower tiers are late and the highest must not wait for their backlog.

Jobs and batch lines wait in the background queues. They get places that cost no time, batches of their own for workers that
would be idle, and a share of every batch while these are less. Such a batch is formed only when a worker is idle, never ahead:
so background work gives way within one batch. Runs begin at nearly even intervals, so that one soon ends.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from scheduler.batching.timing import (
    UNKNOWN,
    Service,
    distance_ms,
    part_distance_ms,
    since_due_ms,
    target_size,
    window_ms,
)
from scheduler.protocol.pool_view import SlotView
from scheduler.states import background_of

AGED_SHARE = 0.05
"""The minimum share of every batch for an aged tier, before the strict order."""


MOST_AT_ONCE = 8
"""Batches planned from one snapshot; requests that arrive meanwhile may be more urgent than the rest."""


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """The order of a tier: priority 1 is first; the share is 0..1 of every batch. A paused tier gets no batches."""

    name: str
    priority: int
    guaranteed_share: float
    paused: bool = False
    slo_ms: float | None = None


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The policy from the model's row and the settings. Times in ms, sizes in requests, input tokens (0: no limit).

    `headroom`: the share (0..1) of its workers' time that a saturated pool keeps free (`timing`); 0: batches have no distances.
    `background_share`: the share (0..1) of every batch for background work while it waits.
    """

    max_batch_size: int
    max_wait_ms: float
    lookahead_workers: int
    ageing_ms: float
    tiers: Sequence[TierPolicy]
    max_batch_tokens: int = 0
    headroom: float = 0.0
    background_share: float = 0.05

    @property
    def order(self) -> Sequence[TierPolicy]:
        """The tiers by priority."""
        return sorted(self.tiers, key=lambda tier: tier.priority)

    def with_shares(self, shares: Mapping[str, float]) -> "BatchPolicy":
        """The policy with these guaranteed shares of tiers; a tier that is not in `shares` keeps its own."""
        if not shares:
            return self
        tiers = [replace(t, guaranteed_share=shares.get(t.name, t.guaranteed_share)) for t in self.tiers]
        return replace(self, tiers=tiers)


@dataclass(frozen=True, slots=True)
class TierQueue:
    """A tier queue: its length, and the wait of its oldest request."""

    depth: int
    oldest_ms: float


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The pool at one time. A leased batch is ready or running; `workers`: the number of healthy ones.

    `since_ms`: time since the last batch was due to leave; `since_formed_ms`: since any dispatcher formed one.
    `background`: the background queue of each tier. `quiet`: tiers in which quiet customers wait. `slots`: None in a pool that
    runs batches.
    """

    tiers: Mapping[str, TierQueue]
    ready_batches: int
    leased_batches: int
    workers: int
    arrivals_per_s: float
    service: Service = UNKNOWN
    since_ms: float = math.inf
    background: Mapping[str, TierQueue] = field(default_factory=dict)
    quiet: Collection[str] = ()
    since_formed_ms: float = math.inf
    slots: SlotView | None = None

    @property
    def waiting(self) -> int:
        """Requests in all tier queues."""
        return sum(tier.depth for tier in self.tiers.values())

    @property
    def in_background(self) -> int:
        """Requests in all background queues."""
        return sum(tier.depth for tier in self.background.values())

    @property
    def idle(self) -> int:
        """Workers without a batch."""
        return max(0, self.workers - self.leased_batches)

    @property
    def oldest_ms(self) -> float:
        """The wait of the oldest request of all tiers; 0 if none is queued."""
        return max((tier.oldest_ms for tier in self.tiers.values() if tier.depth), default=0.0)


FIRST_IDLE, NO_WORKER, FREE_SLOT = -1, -2, -3
"""Values of `WakeCondition.ready`. FIRST_IDLE: only a worker that becomes idle while no other is, or while no batch runs; FREE_SLOT:
only a slot that becomes free."""


@dataclass(frozen=True, slots=True)
class WakeCondition:
    """The condition that wakes a dispatcher.

    `depth` queued requests (0: arrivals do not wake), or a worker that claimed or ended a batch while at most `ready` batches
    are ready, or FIRST_IDLE, or NO_WORKER, or FREE_SLOT.
    """

    depth: int
    ready: int = NO_WORKER


NEVER = WakeCondition(0)


class Waits(NamedTuple):
    """No batch leaves now: decide again after `wait_ms` or on `condition` (None: only then).

    `pace_ms`: then all queued requests leave at once, if no batch was formed for that time; infinite: that needs a decision.
    """

    wait_ms: float | None
    condition: WakeCondition
    pace_ms: float = math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """Form a batch of `picks` now; without picks, decide again after `wait_ms` or on `condition` (None: only then).

    `ready_limit`: passed to `form_batch`, which refuses above it. `credit`: the guaranteed places that are still owed.
    `since_ms`: time since the batch was due. `pace_ms`: see `Waits`.
    """

    picks: Sequence[tuple[str, int]]
    wait_ms: float | None
    condition: WakeCondition
    ready_limit: int
    credit: Mapping[str, float]
    since_ms: float = math.inf
    pace_ms: float = math.inf


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
        owed[_BACKGROUND] = credit.get(_BACKGROUND, 0.0)
        picks, owed = _with_background(picks, owed, snapshot, policy)
        distance = max(distance, _spread_ms(snapshot, policy))
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
    if waiting and waiting + min(snapshot.in_background, _free_places(snapshot.service, size)) >= size:
        return _leaves(snapshot, policy, waits.ready_limit, waits.credit)
    if waiting and snapshot.idle == 1:
        return woken
    spread = _spread_ms(snapshot, policy)
    if snapshot.since_ms < spread:
        left_ms = spread - snapshot.since_ms
        return replace(woken, wait_ms=left_ms if woken.wait_ms is None else min(left_ms, woken.wait_ms))
    picks = _oldest_background(snapshot, policy, size)
    owed = _background_credit(waits.credit, policy) - sum(count for _, count in picks)
    return replace(
        waits,
        picks=picks,
        wait_ms=None,
        condition=NEVER,
        ready_limit=snapshot.ready_batches + snapshot.idle,
        credit={**waits.credit, _BACKGROUND: max(-MOST_AHEAD * size, owed)},
        since_ms=since_due_ms(snapshot.since_ms, spread),
    )


SPREAD = 0.97
"""Runs of a pool that background work fills begin at intervals of at least this part of the even one. Workers that started
together would otherwise also end together, and an interactive request would wait for the rest of a run; at the whole
interval, workers would wait for each other."""


def _spread_ms(snapshot: PoolSnapshot, policy: BatchPolicy) -> float:
    """The least time between the starts of two runs."""
    service = snapshot.service
    return SPREAD * (service.base_ms + policy.max_batch_size * service.item_ms) / snapshot.workers


def _with_background(
    picks: Sequence[tuple[str, int]], owed: Mapping[str, float], snapshot: PoolSnapshot, policy: BatchPolicy
) -> tuple[list[tuple[str, int]], dict[str, float]]:
    """The picks of a batch with background work: its share, of the places of the lowest tiers if the batch is full, and places
    that are left and add no noticeable time.
    """
    size = policy.max_batch_size
    share = _background_credit(owed, policy)
    guaranteed = min(max(0, int(share + 1e-9)), snapshot.in_background)
    left, kept = size - guaranteed, list[tuple[str, int]]()
    for name, count in picks:
        if places := min(count, left):
            kept.append((name, places))
            left -= places
    free = min(left, _free_places(snapshot.service, size))
    background = _oldest_background(snapshot, policy, guaranteed + free)
    left_share = share - sum(count for _, count in background)
    return [*kept, *background], {**owed, _BACKGROUND: max(-MOST_AHEAD * size, left_share)}


_BACKGROUND = ""
"""The name of the credit of background work: negative after it got more than its share."""

MOST_AHEAD = 4.0
"""Batches that background work may have got more than its share, for which it gets no share later."""


def _background_credit(credit: Mapping[str, float], policy: BatchPolicy) -> float:
    """The places that are owed to background work in the next batch."""
    size = policy.max_batch_size
    return min(float(size), credit.get(_BACKGROUND, 0.0) + policy.background_share * size)


UNNOTICED = 0.05
"""The part of a batch's duration that free places may add."""


def _free_places(service: Service, size: int) -> int:
    """How many more requests add at most UNNOTICED to the duration of a batch; none before its duration is known."""
    if not service.base_ms:
        return 0
    return size if service.item_ms <= 0 else int(UNNOTICED * service.base_ms / service.item_ms)


def _oldest_background(snapshot: PoolSnapshot, policy: BatchPolicy, count: int) -> list[tuple[str, int]]:
    """Up to `count` requests of the background queues, strictly by priority."""
    picks = []
    for tier in policy.order:
        depth = snapshot.background[tier.name].depth if tier.name in snapshot.background else 0
        if places := min(count, depth):
            picks.append((background_of(tier.name), places))
            count -= places
    return picks


def plan(snapshot: PoolSnapshot, policy: BatchPolicy, credit: Mapping[str, float]) -> list[Decision]:
    """The decision for now and, if a batch leaves, the next decisions as long as they form batches too.

    Requests arrive in bursts. With one call after another, the last batch of a burst would wait for all the others.
    """
    decisions = [decide(snapshot, policy, credit)]
    while decisions[-1].picks and len(decisions) < MOST_AT_ONCE:
        snapshot = _after(snapshot, decisions[-1])
        following = decide(snapshot, policy, decisions[-1].credit)
        if not following.picks or snapshot.ready_batches >= following.ready_limit:
            break
        decisions.append(following)
    return decisions


def _after(snapshot: PoolSnapshot, decision: Decision) -> PoolSnapshot:
    """The snapshot after the batch is formed. The age of the oldest request is not known then, and taken as unchanged."""
    taken = dict(decision.picks)
    tiers = {name: TierQueue(tier.depth - taken.get(name, 0), tier.oldest_ms) for name, tier in snapshot.tiers.items()}
    background = {
        name: TierQueue(tier.depth - taken.get(background_of(name), 0), tier.oldest_ms)
        for name, tier in snapshot.background.items()
    }
    ready, leased = snapshot.ready_batches + 1, snapshot.leased_batches + 1
    return replace(
        snapshot,
        tiers=tiers,
        ready_batches=ready,
        leased_batches=leased,
        since_ms=decision.since_ms,
        since_formed_ms=0.0,
        background=background,
        quiet=(),
    )


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
    for wanted in (_guaranteed(owed), {t.name: size for t in order}):
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


def _guaranteed(owed: Mapping[str, float]) -> dict[str, int]:
    return {name: int(places + 1e-9) for name, places in owed.items()}
