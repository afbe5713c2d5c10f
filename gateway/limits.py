"""The gateway's use of ratelimit/: observations and demand in, tier limits and each tier's factor out.

Stale input fails in a declared direction: the last capacity holds for 10 s, then it falls to what one GPU of the
pool is said to do. A pool with no healthy GPU keeps its last capacity for the two seconds in which it may come back;
then requests are refused outright. A Redis that lost its workers knows them again one by one: until it knows as many as
before, or every worker that lives must have beaten, the last count stands.

Everything is computed from what all gateways publish, this one's part of it as it was published: so all of them come
to the same, whichever of them a customer asks.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from gateway.admitter import Limits
from gateway.catalog_view import ModelRow, SnapshotView, TierRow
from ratelimit.capacity import capacity_rps, rate_rps
from ratelimit.shares import TierShare, allocate, ceilings, factor
from ratelimit.slew import relax
from scheduler.admission import TierLimit
from scheduler.observation import GatewayStats, Observation, TierStats, WorkerView

HOLD_S = 10.0
REFILL_S = 1.0  # A worker that did not beat for so long is gone; as TIERLANE_GONE_MS by default.
WAITING_ROOM_S = 2.0
MEMORY_FULL = 0.8  # From this part of its memory limit on, Redis is given no new requests,
MEMORY_EASED = 0.75  # until it is under this one: what is queued must always have room to end.
TIER_BURST_S = 1.0  # A tier's bucket holds what its rate gives in so long.
LONGEST_STEP_S = 1.0  # Limits relax by no more at once: time in which nobody looked was not seen to be calm.


class LiveLimits:
    """The limits in force. Times are monotonic seconds; nothing here does I/O.

    `healthy_gpus` is how many GPUs the capacity counts on: those last seen healthy, 1 once that is too long ago.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._snapshot: SnapshotView | None = None
        self._demand: Mapping[str, float] = {}
        self._drain: Mapping[str, float] = {}
        self._allocated: Mapping[str, float] = {}
        self._ceilings: Mapping[str, float] = {}
        self._factors: Mapping[str, float] = {}
        self._limits = Limits((), 0.0)
        self._observed_at: float | None = None
        self._no_gpu_since: float | None = None
        self._rates: Sequence[float] = ()  # Of the healthy GPUs, as they count.
        self._refill_until = 0.0
        self.capacity_rps = 0.0
        self.healthy_gpus = 0
        self.memory_share = 0.0
        self.short_of_memory = False

    def observe(self, observation: Observation, snapshot: SnapshotView, now: float) -> None:
        """Take a fresh look at the pool and allocate anew."""
        if self._observed_at is None:  # Others may still be on their way back up: begin where they are.
            self._factors = _lowest(observation.gateways)
        elapsed_s = now - self._observed_at if self._observed_at is not None else 0.0
        self._observed_at = now
        self._count(self._known(healthy_rates(observation, snapshot, self._pool), now), snapshot, now)
        self._demand = _total(observation.gateways, "demand_rps")
        self._drain = _total(observation.gateways, "answered_rps")
        self._allocate(snapshot, min(elapsed_s, LONGEST_STEP_S))

    def emptied(self, now: float) -> None:
        """Redis may have lost its workers; what is seen of them next is a part of the picture."""
        self._refill_until = now + REFILL_S

    def lapse(self, snapshot: SnapshotView, now: float) -> None:
        """There is no fresh look: hold the last one, later fall to the floor. Of Redis' memory nothing is known then."""
        if self._observed_at is None or now - self._observed_at > HOLD_S:
            self.capacity_rps, self.healthy_gpus = _floor(snapshot, self._pool), 1
            self._drain = {}
            self.memory(0.0)
            self._allocate(snapshot, 0.0)

    def current(self, snapshot: SnapshotView) -> Limits:
        """What to tell admission. A changed catalog is obeyed at once, not with the next observation."""
        if snapshot is not self._snapshot:
            if self.capacity_rps <= 0:
                self.capacity_rps = _floor(snapshot, self._pool)
            self._allocate(snapshot, 0.0)
        return self._limits

    def factor(self, tier: str) -> float:
        """The part of its base limits that each customer of the tier has now, 0..1; always 1 in a tier in shadow."""
        return self._factors.get(tier, 1.0)

    def allocated(self, tier: str) -> float:
        """The tier's part of the capacity, requests/s: no more than it asks for."""
        return self._allocated.get(tier, 0.0)

    def ceiling(self, tier: str) -> float:
        """What the tier may use at the most, requests/s, as the other tiers ask now."""
        return self._ceilings.get(tier, self.capacity_rps)

    def demand(self, tier: str) -> float:
        """What the tier asks for, requests/s over all gateways: what its customers' base limits would let through."""
        return self._demand.get(tier, 0.0)

    def drain_rps(self, tier: str) -> float:
        """Measured answers/s of the tier over all gateways; 0 where nothing is known of it."""
        return self._drain.get(tier, 0.0)

    def pressure(self, tier: str) -> float:
        """How many times what it may use at the most the tier asks for."""
        ceiling = self.ceiling(tier)
        return self.demand(tier) / ceiling if ceiling > 0 else math.inf

    def no_gpu(self, now: float) -> bool:
        """Whether there has been no healthy GPU for longer than one may be waited for."""
        return self._no_gpu_since is not None and now - self._no_gpu_since > WAITING_ROOM_S

    def memory(self, share: float) -> None:
        """Redis says which part of its memory limit it uses, 0..1; 0 where it has none."""
        self.memory_share = share
        self.short_of_memory = share >= (MEMORY_EASED if self.short_of_memory else MEMORY_FULL)

    def told(self, stats: GatewayStats) -> GatewayStats:
        """What is published: what was metered, with what is shared out here."""
        tiers = {name: self._told(name, each) for name, each in stats.tiers.items()}
        return msgspec.structs.replace(stats, tiers=tiers, capacity_rps=round(self.capacity_rps, 3))

    def _told(self, name: str, stats: TierStats) -> TierStats:
        allocated_rps = round(self.allocated(name), 3)
        return msgspec.structs.replace(stats, factor=round(self.factor(name), 4), allocated_rps=allocated_rps)

    def _known(self, rates: Sequence[float], now: float) -> Sequence[float]:
        """What counts of the rates that were seen: those from before as long as an emptied Redis knows fewer."""
        if now >= self._refill_until or len(rates) >= len(self._rates):
            self._refill_until = 0.0
            self._rates = rates
        return self._rates

    def _count(self, rates: Sequence[float], snapshot: SnapshotView, now: float) -> None:
        """Take the rates of the healthy GPUs."""
        self.healthy_gpus = len(rates)
        if rates:
            self._no_gpu_since = None
            self.capacity_rps = _capacity(rates, snapshot, self._pool)
        elif self._no_gpu_since is None:
            self._no_gpu_since = now
        if self.capacity_rps <= 0:
            self.capacity_rps = _floor(snapshot, self._pool)

    def _allocate(self, snapshot: SnapshotView, elapsed_s: float) -> None:
        shares = [TierShare(tier.name, tier.priority, tier.guaranteed_share) for tier in snapshot.tiers]
        self._snapshot = snapshot
        self._allocated = allocate(self.capacity_rps, shares, self._demand)
        self._ceilings = ceilings(self.capacity_rps, shares, self._demand)
        self._factors = {tier.name: self._next_factor(tier, elapsed_s) for tier in snapshot.tiers}
        self._limits = Limits([self._tier_limit(tier, snapshot.tiers) for tier in snapshot.tiers], self.capacity_rps)

    def _next_factor(self, tier: TierRow, elapsed_s: float) -> float:
        if tier.shadow:  # What is not enforced is not announced either.
            return 1.0
        target = factor(self.allocated(tier.name), self.demand(tier.name))
        return relax(self.factor(tier.name), target, elapsed_s)

    def _tier_limit(self, tier: TierRow, tiers: Sequence[TierRow]) -> TierLimit:
        rate = self.ceiling(tier.name)
        return TierLimit(
            name=tier.name,
            rate=rate,
            burst=max(1.0, rate * TIER_BURST_S),
            max_depth=tier.max_queue_depth,
            ahead=[other.name for other in tiers if other.priority <= tier.priority],
            shed_depth=-1 if tier.shed_depth is None else tier.shed_depth,
            shed_wait_ms=-1 if tier.shed_wait_ms is None else tier.shed_wait_ms,
            share=tier.guaranteed_share,
            shadow=tier.shadow,
        )


def healthy_rates(observation: Observation, snapshot: SnapshotView, pool: str) -> list[float]:
    """What each healthy worker does with full batches, requests/s; 0 where that was not measured."""
    batch = min((model.max_batch_size for model in _models(snapshot, pool)), default=0)
    return [_rate(worker, batch) for worker in observation.workers if worker.healthy]


def _capacity(rates: Sequence[float], snapshot: SnapshotView, pool: str) -> float:
    models = _models(snapshot, pool)
    # A pool's GPUs run all its models, so the most careful row speaks for the pool.
    prior = min((model.rps_per_gpu for model in models), default=0.0)
    target = min((model.target_utilization for model in models), default=1.0)
    return capacity_rps(rates, prior, target)


def _models(snapshot: SnapshotView, pool: str) -> list[ModelRow]:
    return [model for model in snapshot.models.values() if model.enabled and model.pool == pool]


def _rate(worker: WorkerView, batch: int) -> float:
    """Measured at the size that batches are formed of now, which an admin may change; 0 where it is not known."""
    if worker.seen_batch <= 0:  # An older worker tells one figure.
        return worker.rps
    return rate_rps(worker.base_ms, worker.item_ms, worker.seen_batch, batch)


def _floor(snapshot: SnapshotView, pool: str) -> float:
    """What one GPU whose rate is not measured would add."""
    return _capacity([0.0], snapshot, pool)


def _total(gateways: Sequence[GatewayStats], figure: str) -> dict[str, float]:
    """A figure of each tier, added up over the gateways."""
    total: dict[str, float] = {}
    for gateway in gateways:
        for name, stats in gateway.tiers.items():
            total[name] = total.get(name, 0.0) + getattr(stats, figure)
    return total


def _lowest(gateways: Sequence[GatewayStats]) -> dict[str, float]:
    """The lowest factor of each tier at any gateway."""
    lowest: dict[str, float] = {}
    for gateway in gateways:
        for name, stats in gateway.tiers.items():
            lowest[name] = min(lowest.get(name, 1.0), stats.factor)
    return lowest
