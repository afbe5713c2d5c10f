"""When a batch leaves and who is in it: a pure function of a snapshot. No Redis, no clock, no await.

Late binding: nothing is formed beyond what the workers need ready, so that whatever waits can still be overtaken.
Full or due: a full batch leaves at once; a part batch only for an idle worker, when it has the size that the load asks
for (`timing`), when its window is over, or when waiting would bring it less than one more request. Order: strict by priority, with two guards that bound the wait of every
admitted request: a guaranteed share per tier (kept as credit from batch to batch), and ageing (while a tier's oldest request
has waited for `ageing_ms`, its share is at least a twentieth). More would turn the order around when it matters most:
after a loss of GPUs every lower tier is late, and a higher one must not wait for their backlog.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.batching.timing import UNKNOWN, Service, distance_ms, since_due_ms, target_size, window_ms

AGED_SHARE = 0.05
"""The share of every batch that an aged tier has at the least, ahead of the strict order."""


MOST_AT_ONCE = 8
"""Batches that are planned in one look; what comes meanwhile may be more urgent than the rest."""


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """What the order needs to know of a tier; priority 1 goes first, the share is 0..1 of every batch.

    A paused one is no part of the order: nothing is formed of it.
    """

    name: str
    priority: int
    guaranteed_share: float
    paused: bool = False


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """What the model's row and the settings say. Times in ms, sizes in requests, tokens of the input (0: no limit).

    `headroom`: the part (0..1) of its workers' time that a saturated pool keeps free (`timing`).
    """

    max_batch_size: int
    max_wait_ms: float
    lookahead_workers: int
    ageing_ms: float
    tiers: Sequence[TierPolicy]
    max_batch_tokens: int = 0
    headroom: float = 0.0


@dataclass(frozen=True, slots=True)
class TierQueue:
    """A tier queue: its length, and how long its oldest member has waited."""

    depth: int
    oldest_ms: float


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One look at the pool. A leased batch is ready or running; `workers` counts the healthy ones.

    `since_ms`: how long ago the last batch was due to leave.
    """

    tiers: Mapping[str, TierQueue]
    ready_batches: int
    leased_batches: int
    workers: int
    arrivals_per_s: float
    service: Service = UNKNOWN
    since_ms: float = math.inf

    @property
    def waiting(self) -> int:
        """Requests in all tier queues."""
        return sum(tier.depth for tier in self.tiers.values())

    @property
    def idle(self) -> int:
        """Workers for which there is no batch."""
        return max(0, self.workers - self.leased_batches)

    @property
    def oldest_ms(self) -> float:
        """How long the oldest request of all has waited; 0 where none waits."""
        return max((tier.oldest_ms for tier in self.tiers.values() if tier.depth), default=0.0)


@dataclass(frozen=True, slots=True)
class WakeCondition:
    """What is worth waking a dispatcher for.

    `depth` waiting requests (0: however many, they change nothing), or a worker that took or ended a batch with at most
    `ready` batches standing ready (-1: only once nothing runs any more; -2: whatever workers do changes nothing).
    """

    depth: int
    ready: int = -2


NEVER = WakeCondition(0)


@dataclass(frozen=True, slots=True)
class Decision:
    """Form a batch of `picks` now; or, with no picks, look again after `wait_ms` or when `wish` says so (None: only then).

    `ready_limit` is repeated to `form_batch`, which refuses above it, `credit` is what the guarantee owes from now on, and
    `since_ms` how long ago the batch was due.
    """

    picks: Sequence[tuple[str, int]]
    wait_ms: float | None
    wish: WakeCondition
    ready_limit: int
    credit: Mapping[str, float]
    since_ms: float = math.inf


def ready_limit(workers: int, per_workers: int) -> int:
    """How many batches may stand ready: one for each `per_workers` workers, and at least one.

    Idle workers need no more: each of them takes what is made ready at once, so that it does not stand there.
    """
    return max(1, math.ceil(workers / per_workers))


def decide(snapshot: PoolSnapshot, policy: BatchPolicy, credit: Mapping[str, float]) -> Decision:
    """Whether a batch should leave now, and with whom.

    `credit` is what the guarantee still owes each tier from earlier batches; the decision carries the new one.
    """
    limit = ready_limit(snapshot.workers, policy.lookahead_workers)
    distance = distance_ms(snapshot.workers, snapshot.service, policy.max_batch_size, policy.headroom)
    waits = _waits(snapshot, policy, limit, distance)
    if waits is not None:
        return Decision((), waits[0], waits[1], limit, credit, snapshot.since_ms)
    picks, owed = choose(snapshot.tiers, policy, credit)
    # An idle worker may be on its way to the line: one more may stand there for it.
    return Decision(picks, None, NEVER, limit + bool(snapshot.idle), owed, since_due_ms(snapshot.since_ms, distance))


def plan(snapshot: PoolSnapshot, policy: BatchPolicy, credit: Mapping[str, float]) -> list[Decision]:
    """The decision for now, and where a batch leaves those behind it that would be made next, if nothing else changed.

    Requests come in bursts: made one after another, with a call each, the last batch of a burst would wait for all others.
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
    """What is there once the batch is formed. Who waits longest is not known then, and taken to be as old as before."""
    taken = dict(decision.picks)
    tiers = {name: TierQueue(tier.depth - taken.get(name, 0), tier.oldest_ms) for name, tier in snapshot.tiers.items()}
    ready, leased = snapshot.ready_batches + 1, snapshot.leased_batches + 1
    since_ms = decision.since_ms
    return replace(snapshot, tiers=tiers, ready_batches=ready, leased_batches=leased, since_ms=since_ms)


def _waits(
    snapshot: PoolSnapshot, policy: BatchPolicy, limit: int, distance: float
) -> tuple[float | None, WakeCondition] | None:
    """None where a batch leaves now; else after how many ms to look again, and what would change that."""
    if snapshot.waiting and not snapshot.workers:
        return None, NEVER
    if snapshot.waiting and snapshot.ready_batches >= limit + snapshot.idle:
        return None, WakeCondition(0, limit // 2)
    saturated = snapshot.waiting >= policy.max_batch_size * (snapshot.idle + 1)
    if saturated and snapshot.since_ms < distance:
        return distance - snapshot.since_ms, WakeCondition(0, limit // 2)
    if snapshot.waiting >= policy.max_batch_size:
        return None
    if snapshot.waiting and not snapshot.idle:
        return None, WakeCondition(policy.max_batch_size, 0)
    return _gathers(snapshot, policy)


def _gathers(snapshot: PoolSnapshot, policy: BatchPolicy) -> tuple[float | None, WakeCondition] | None:
    """The same, for a worker that is idle and less than a full batch."""
    rate = snapshot.arrivals_per_s
    target = target_size(rate, snapshot.workers, snapshot.service, policy.max_batch_size)
    longest_ms = window_ms(target, rate, policy.max_wait_ms)
    if not snapshot.waiting:
        return longest_ms or None, WakeCondition(target)
    left_ms = longest_ms - snapshot.oldest_ms
    nothing_runs = not snapshot.leased_batches  # Whoever asks again only once it is answered is here already.
    if nothing_runs or snapshot.waiting >= target or left_ms <= 0 or rate * left_ms < 1000:
        return None
    return left_ms, WakeCondition(target, -1)


def choose(
    tiers: Mapping[str, TierQueue], policy: BatchPolicy, credit: Mapping[str, float]
) -> tuple[list[tuple[str, int]], dict[str, float]]:
    """Fill one batch: (tier, places) in priority order, and the credit that the tiers carry on.

    Places go to guarantees first, aged tiers' among them, then strictly by priority. A tier's credit grows by its share
    of each batch while it has something waiting, falls by what it was given, and never exceeds one batch.
    """
    size = policy.max_batch_size
    order = sorted(policy.tiers, key=lambda t: t.priority)
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
