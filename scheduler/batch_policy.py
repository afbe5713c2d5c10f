"""When a batch leaves and who is in it: a pure function of a snapshot. No Redis, no clock, no await.

Late binding: nothing is formed beyond what the workers need ready, so that whatever waits can still be overtaken.
Full or due: a full batch leaves at once; a part batch only for an idle worker, when its window is over or when waiting
would bring it less than one more request. Order: strict by priority, with two guards that bound the wait of every
admitted request: a guaranteed share per tier (kept as credit from batch to batch), and ageing (while a tier's oldest request
has waited for `ageing_ms`, its share is at least a twentieth). More would turn the order around when it matters most:
after a loss of GPUs every lower tier is late, and a higher one must not wait for their backlog.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AGED_SHARE = 0.05
"""The share of every batch that an aged tier has at the least, ahead of the strict order."""


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """What the order needs to know of a tier; priority 1 goes first, the share is 0..1 of every batch."""

    name: str
    priority: int
    guaranteed_share: float


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """What the model's row and the settings say. Times in ms, sizes in requests."""

    max_batch_size: int
    max_wait_ms: float
    lookahead_workers: int
    ageing_ms: float
    tiers: Sequence[TierPolicy]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A tier queue: its length, and how long its oldest member has waited."""

    depth: int
    oldest_ms: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at the pool. A leased batch is ready or running; `workers` counts the healthy ones."""

    tiers: Mapping[str, Waiting]
    ready_batches: int
    leased_batches: int
    workers: int
    arrivals_per_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Form a batch of `picks` now; or, with no picks, look again after `wait_ms` or when something changes (None).

    `wake_depth` is how many waiting requests are worth another look before that: 0 where only a worker can change
    anything. `ready_limit` is repeated to `form_batch`, which refuses above it, and `credit` is what the guarantee owes
    from now on.
    """

    picks: Sequence[tuple[str, int]]
    wait_ms: float | None
    wake_depth: int
    ready_limit: int
    credit: Mapping[str, float]


def ready_limit(snapshot: Snapshot, per_workers: int) -> int:
    """How many batches may stand ready: one for each worker that runs none, and at least the look-ahead.

    The look-ahead is one batch for each `per_workers` workers, and never under one.
    """
    running = snapshot.leased_batches - snapshot.ready_batches
    return max(1, math.ceil(snapshot.workers / per_workers), snapshot.workers - running)


def decide(snapshot: Snapshot, policy: BatchPolicy, credit: Mapping[str, float]) -> Decision:
    """Whether a batch should leave now, and with whom.

    `credit` is what the guarantee still owes each tier from earlier batches; the decision carries the new one.
    """
    waiting = sum(tier.depth for tier in snapshot.tiers.values())
    limit = ready_limit(snapshot, policy.lookahead_workers)
    if waiting == 0:
        return Decision((), None, 1, limit, credit)
    if snapshot.workers == 0 or snapshot.ready_batches >= limit:
        return Decision((), None, 0, limit, credit)
    if waiting < policy.max_batch_size:
        idle = snapshot.workers - snapshot.leased_batches
        left_ms = due_in_ms(snapshot, policy) if idle > 0 else None
        if left_ms is None or left_ms > 0:
            return Decision((), left_ms, policy.max_batch_size, limit, credit)
    picks, owed = choose(snapshot.tiers, policy, credit)
    return Decision(picks, None, 0, limit, owed)


def due_in_ms(snapshot: Snapshot, policy: BatchPolicy) -> float:
    """How long a part batch should go on waiting; 0 means that it leaves now."""
    oldest_ms = max((tier.oldest_ms for tier in snapshot.tiers.values() if tier.depth), default=0.0)
    left_ms = policy.max_wait_ms - oldest_ms
    if left_ms <= 0 or snapshot.arrivals_per_s * left_ms / 1000 < 1:
        return 0.0
    return left_ms


def choose(
    tiers: Mapping[str, Waiting], policy: BatchPolicy, credit: Mapping[str, float]
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


def _owed(tier: TierPolicy, tiers: Mapping[str, Waiting], credit: Mapping[str, float], policy: BatchPolicy) -> float:
    waiting = tiers.get(tier.name)
    if waiting is None or not waiting.depth:
        return 0.0
    late = waiting.oldest_ms >= policy.ageing_ms
    share = max(tier.guaranteed_share, AGED_SHARE) if late else tier.guaranteed_share
    return min(float(policy.max_batch_size), credit.get(tier.name, 0.0) + share * policy.max_batch_size)


def _guaranteed(owed: Mapping[str, float]) -> dict[str, int]:
    return {name: int(places + 1e-9) for name, places in owed.items()}
