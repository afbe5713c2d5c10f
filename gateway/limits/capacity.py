"""The gateway's use of ratelimit/: observations and demand in, tier limits and each tier's factor out.

The capacity is estimated from measurements (ratelimit/capacity.py). Before any GPU of the pool has run a batch there is
only a guess, and no limit is computed from it: the predicted wait, the shed rules and the depth of the queues decide.

Stale input fails in a declared direction: the last capacity holds for 10 s, then it falls to that of the GPUs that this
gateway calls directly, at least one. A pool without a healthy GPU keeps its last capacity for two seconds, in which a GPU
may return; then requests are rejected. After a Redis restart workers report again one by one: the last count holds until
as many have reported as before, or until every live worker must have sent a heartbeat.

Workers move between the cells of a pool, so the limits of each cell are computed from all of its cells, as those of a single
queue. Only the predicted wait uses a part of the capacity: that which a cell gets by its need.

Everything is computed from what all gateways publish, including this one's own published part, so all of them get the
same result.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec

from gateway.inference.admission import AdmissionLimits
from ledger.catalog.snapshot import Model, Snapshot, Tier
from ratelimit.capacity import Capacity, CapacityEstimator, CapacityEvidence, GpuRate, PoolLoad, PoolRate, relax
from ratelimit.quotas import Meter
from ratelimit.request_limits import LANGUAGE_MODEL, RequestLimits, limits_of_workers
from ratelimit.shares import TierShare, allocate, ceilings, factor, part_of_capacity, remembered
from ratelimit.slot_capacity import FULL, SlotEstimator
from scheduler.cells.placement import HORIZON_S
from scheduler.protocol.admission import TierLimit
from scheduler.protocol.pool_view import GatewayStats, Observation, TierStats, WorkerView

HOLD_S = 10.0
WAITING_ROOM_S = 2.0
MEMORY_FULL = 0.8  # At this part of its memory limit, Redis gets no new requests,
MEMORY_EASED = 0.75  # until it is below this one: queued requests need memory to complete.
TIER_BURST_S = 1.0  # A tier's bucket holds what its rate adds in this time.
LONGEST_STEP_S = 1.0  # Limits relax by no more at once: without observations, no calm was observed.
UNBOUNDED_RPS = 1e9  # Allocated while the capacity is only a guess: more than any pool serves.
BACKLOG_RUNS = 2.0  # A wait longer than this many runs is a backlog; without one a request leaves with the next batch.
BACKLOG_LEAST_MS = 100.0  # Shorter waits come from batch windows and timers.
SLOW_SEEN_MS = 2000.0  # A slow worker that sent no heartbeat for longer is lost, not slow.
_SOON = frozenset({"starting", "down"})  # While a model process is replaced; a lost GPU is down, too, for longer.
PLACES = 32  # In a tier queue of a pool without an enabled model.
MOST_SLOT_PLACES = 8  # In a tier queue of a pool with slots,
SLOTS_PER_PLACE = 16  # one for so many: each delays requests in backlogs by the time until the next slot is free.
OPEN_PART = 2  # With one part in so many of the slots, a customer without a backlog is within its share of the tier.
LIMITING_SHARE = 0.005  # Of arriving requests; fewer rejections do not cause a probe.


class LiveLimits:
    """The limits in force. Times are monotonic seconds; nothing here does I/O.

    `healthy_gpus` is the number of GPUs that the capacity is computed from, in all cells: those of the last observation; once
    that is too old, those of them that are called directly, or 1.
    """

    def __init__(
        self, pool: str, chosen: Callable[[RequestLimits], RequestLimits] = lambda of_backend: of_backend
    ) -> None:
        """`chosen`: the limits of a request with the settings, from those of the pool's backend."""
        self._pool = pool
        self._chosen = chosen
        self._of_backend = LANGUAGE_MODEL  # Until a worker is known: no chat may be cut short.
        self.request = chosen(self._of_backend)
        """The limits of one request: its time, its wait, its size."""
        self._snapshot: Snapshot | None = None
        self._demand: Mapping[str, float] = {}
        self._remembered: Mapping[str, float] = {}  # Demand as it was before the limits were reduced.
        self._unreduced: Mapping[str, float] = {}  # Demand as it would be without reduced limits.
        self._drain: Mapping[str, float] = {}
        self._allocated: Mapping[str, float] = {}
        self._ceilings: Mapping[str, float] = {}
        self._factors: Mapping[str, float] = {}
        self._limits = AdmissionLimits((), 0.0)
        self._observed_at: float | None = None
        self._no_gpu_since: float | None = None
        self._estimator = CapacityEstimator()
        self._slot_estimator = SlotEstimator()
        self._rps_per_gpu = 0.0  # At the last observation.
        self._request_us = (
            Meter().gpu_us
        )  # GPU time of a request that runs alone on the slowest worker, as last measured.
        self.estimate = Capacity(0.0, CapacityEvidence.PRIOR, 0.0)
        """The capacity of the GPUs, and the evidence for it."""
        self._gpus: Sequence[GpuRate] = ()  # The healthy ones.
        self._reached = 0
        self._refill_until = 0.0
        self.registering = False
        """Whether Redis was emptied a moment ago and has fewer workers than before, or no scheduler."""
        self._needs: Mapping[str, float] = {}
        self._cell_needs: Mapping[str, float] = {}
        self._cell_demand: Mapping[str, float] = {}
        self._cell_least = 1.0  # The least part of the capacity of this cell.
        self._cell_gpus = 1.0  # Of the healthy GPUs, those that serve this cell now.
        self.capacity_rps = 0.0
        self.healthy_gpus = 0
        self.memory_share = 0.0
        self.short_of_memory = False
        self.model_too_slow = False
        """No worker can serve, because the model takes longer than its cap. Applies to requests that Redis would queue."""

    def observe(self, cell: Observation, snapshot: Snapshot, now: float, whole: Observation | None = None) -> None:
        """Take a new observation of the pool in this cell and allocate again. `whole`: in all cells; None: there is one."""
        observation = cell if whole is None else whole
        self._of_backend = limits_of_workers(observation.workers, self._of_backend)
        self.request = self._chosen(self._of_backend)
        gpus = observation.healthy_gpus
        self._cell_gpus = cell.healthy_gpus / gpus if gpus else 1.0
        # Workers follow the need, but a quiet cell has some that are ready, and one that all have left gets one for its first
        # request: its need alone would predict long waits.
        self._cell_least = max(1, cell.healthy_gpus) / gpus if gpus else 1.0
        self._needs, self._cell_needs = _needs(observation), _needs(cell)
        self._cell_demand = _total(cell.gateways, lambda stats: stats.demand_rps)
        if self._observed_at is None:  # The limits of other gateways may still be rising: begin at the lowest.
            factors: dict[str, float] = {}
            for gateway in observation.gateways:
                for name, stats in gateway.tiers.items():
                    factors[name] = min(factors.get(name, 1.0), stats.factor)
            self._factors = factors
            self._estimator.resume(min((each.capacity_correction for each in observation.gateways), default=1.0))
        elapsed_s = now - self._observed_at if self._observed_at is not None else 0.0
        self._observed_at = now
        self._count(self._known(healthy_gpus(observation), observation, now), observation, snapshot, now)
        unhealthy_s = now - self._no_gpu_since if self._no_gpu_since is not None else 0.0
        self.model_too_slow = now >= self._refill_until and is_too_slow(observation.workers, unhealthy_s)
        self._demand = _total(observation.gateways, lambda stats: stats.demand_rps)
        self._remembered = {
            name: remembered(self._remembered.get(name, 0.0), rps, self.factor(name), elapsed_s)
            for name, rps in self._demand.items()
        }
        # Without reduced limits the demand would be as before, up to what buckets show.
        unreduced = _total(observation.gateways, lambda stats: stats.unreduced_rps or stats.demand_rps)
        self._unreduced = {name: min(rps, self._remembered[name]) for name, rps in unreduced.items()}
        self._drain = _total(observation.gateways, lambda stats: stats.answered_rps)
        self._request_us = round(max(map(_alone_ms, observation.workers), default=0.0) * 1000) or self._request_us
        self._allocate(snapshot, min(elapsed_s, LONGEST_STEP_S))

    @property
    def cell_capacity_rps(self) -> float:
        """The capacity of the GPUs that serve this cell now."""
        return self.capacity_rps * self._cell_gpus

    def emptied(self, until: float) -> None:
        """Redis may have lost its workers: until then, observations may have only some of them."""
        self._refill_until = until

    def reached(self, gpus: int) -> None:
        """Note the number of GPUs that can be called directly now."""
        self._reached = gpus

    def lapse(self, snapshot: Snapshot, now: float) -> None:
        """Without a new observation the last one holds for HOLD_S, then the floor. The memory of Redis is not known then."""
        if self._observed_at is None or now - self._observed_at > HOLD_S:
            one, gpus = self._of_one_gpu(snapshot), max(1, min(self._reached, len(self._gpus)))
            self.estimate, self.healthy_gpus = one._replace(rps=one.rps * gpus), gpus
            self.capacity_rps = self.estimate.rps * self._target(snapshot)
            self._drain = {}
            self.memory(0.0)
            self._allocate(snapshot, 0.0)

    def current(self, snapshot: Snapshot) -> AdmissionLimits:
        """The limits for admission. A changed catalog applies at once, not with the next observation."""
        if snapshot is not self._snapshot:
            if self.capacity_rps <= 0:
                self._guess(snapshot)
            self._allocate(snapshot, 0.0)
        return self._limits

    def meter(self, model: str) -> Meter:
        """What metered quotas charge for a request of a model: GPU time as measured, and the present prices."""
        row = self._snapshot.models.get(model) if self._snapshot else None
        return Meter(self._request_us) if row is None else Meter(self._request_us, *row.price_at(time.time())[1:])

    def factor(self, tier: str) -> float:
        """The part of its base limits that each customer of the tier has now, 0..1; always 1 in a tier in shadow."""
        return self._factors.get(tier, 1.0)

    def allocated(self, tier: str) -> float:
        """The tier's part of the capacity, requests/s: at most its demand."""
        return self._allocated.get(tier, 0.0)

    def ceiling(self, tier: str) -> float:
        """What the tier may use at most, requests/s, at the present demand of the other tiers."""
        return self._ceilings.get(tier, self.capacity_rps)

    def demand(self, tier: str) -> float:
        """The demand of the tier, requests/s over all gateways: the arrivals that its customers' base limits accept."""
        return self._demand.get(tier, 0.0)

    def drain_rps(self, tier: str) -> float:
        """Measured responses/s of the tier over all gateways; 0 where not known."""
        return self._drain.get(tier, 0.0)

    def pressure(self, tier: str) -> float:
        """The demand of the tier, if no limit were reduced, as a multiple of what it may use at most."""
        ceiling = self.ceiling(tier)
        return self._unreduced.get(tier, 0.0) / ceiling if ceiling > 0 else math.inf

    def no_gpu(self, now: float) -> bool:
        """Whether there has been no healthy GPU for longer than requests may wait for one."""
        return self._no_gpu_since is not None and now - self._no_gpu_since > WAITING_ROOM_S

    def memory(self, share: float) -> None:
        """Note the part of its memory limit that Redis uses, 0..1; 0 without a limit."""
        self.memory_share = share
        self.short_of_memory = share >= (MEMORY_EASED if self.short_of_memory else MEMORY_FULL)

    def published(self, stats: GatewayStats) -> GatewayStats:
        """The measured stats with the allocation, as the heartbeat sends them."""
        replace = msgspec.structs.replace
        return replace(
            stats,
            tiers={
                name: replace(each, factor=round(self.factor(name), 4), allocated_rps=round(self.allocated(name), 3))
                for name, each in stats.tiers.items()
            },
            capacity_rps=round(self.cell_capacity_rps, 3),
            capacity_evidence=self.estimate.evidence.value,
            capacity_confidence=round(self.estimate.confidence, 3),
            capacity_correction=round(self._estimator.correction, 4),
        )

    def _known(self, gpus: Sequence[GpuRate], observation: Observation, now: float) -> Sequence[GpuRate]:
        """The GPUs to compute with: those from before while an emptied Redis has fewer."""
        emptied, fewer = now < self._refill_until, len(gpus) < len(self._gpus)
        self.registering = emptied and (fewer or observation.pass_age_ms is None)
        if not (emptied and fewer):
            self._gpus = gpus
        if not self.registering:
            self._refill_until = 0.0
        return self._gpus

    def _count(self, gpus: Sequence[GpuRate], observation: Observation, snapshot: Snapshot, now: float) -> None:
        """Estimate the capacity from the reports of the healthy GPUs and from the queues."""
        self.healthy_gpus = len(gpus)
        if gpus:
            self._no_gpu_since = None
            prior_rps, fixed = _prior(snapshot, self._pool)
            load = pool_load(observation, gpus, snapshot, self._factors)
            if fixed:
                self.estimate = Capacity(prior_rps * len(gpus), CapacityEvidence.FIXED, 1.0)
            elif any(gpu.slots for gpu in gpus):
                self.estimate = self._slot_estimator.look(gpus, prior_rps, load, now)
            else:
                self.estimate = self._estimator.look(gpus, batch_size(snapshot, self._pool), prior_rps, load, now)
            self.capacity_rps = self.estimate.rps * self._target(snapshot)
        else:
            self._estimator.interrupt()
            self._slot_estimator.interrupt()
            if self._no_gpu_since is None:
                self._no_gpu_since = now
        if self.capacity_rps <= 0:
            self._guess(snapshot)

    def _target(self, snapshot: Snapshot) -> float:
        """The part of the capacity that the limits use. With slots all of it: a request waits only while none is free."""
        return 1.0 if any(gpu.slots for gpu in self._gpus) else _target(snapshot, self._pool)

    def _of_one_gpu(self, snapshot: Snapshot) -> Capacity:
        if self.estimate.rps <= 0:
            prior_rps, fixed = _prior(snapshot, self._pool)
            return Capacity(prior_rps, CapacityEvidence.FIXED if fixed else CapacityEvidence.PRIOR, float(fixed))
        return self.estimate._replace(rps=self.estimate.rps / max(1, self.healthy_gpus))

    def _guess(self, snapshot: Snapshot) -> None:
        self.estimate = self._of_one_gpu(snapshot)
        self.capacity_rps = self.estimate.rps * self._target(snapshot)

    def _allocate(self, snapshot: Snapshot, elapsed_s: float) -> None:
        shares = [TierShare(tier.name, tier.priority, tier.guaranteed_share) for tier in snapshot.tiers]
        shared_rps = self.capacity_rps if self.estimate.binding else UNBOUNDED_RPS
        self._snapshot = snapshot
        self._allocated = allocate(shared_rps, shares, self._demand)
        self._ceilings = ceilings(shared_rps, shares, self._demand)
        before_rps, self._rps_per_gpu = self._rps_per_gpu, self.estimate.rps / max(1, self.healthy_gpus)
        # How many times higher the capacity of a GPU is than at the last observation.
        growth = max(1.0, self._rps_per_gpu / before_rps) if before_rps > 0 else 1.0
        factors: dict[str, float] = {}
        for tier in snapshot.tiers:
            target = factor(self.ceiling(tier.name), self._unreduced.get(tier.name, 0.0))
            # Newly measured capacity was there all the time: limits relax slowly only where capacity may be lost again.
            relaxed = relax(min(1.0, self.factor(tier.name) * growth), target, elapsed_s)
            # Limits that are not enforced are not announced either.
            factors[tier.name] = 1.0 if tier.shadow else relaxed
        self._factors = factors
        here = part_of_capacity(
            shared_rps, shares, self._needs, self._cell_needs, self._cell_demand, least=self._cell_least
        )
        limits = [
            self._tier_limit(tier, snapshot, share.guaranteed_share, here.ceiling(tier.name, self.ceiling(tier.name)))
            for tier, share in zip(snapshot.tiers, here.shares, strict=True)
        ]
        wait_rps = self.estimate.wait_rps * self._target(snapshot)
        self._limits = AdmissionLimits(limits, wait_rps * here.part)

    def _tier_limit(self, tier: Tier, snapshot: Snapshot, share: float, rate: float) -> TierLimit:
        """`share` and `rate`: what this cell guarantees to the tier, and gives it at most."""
        slots, shed_wait_ms = sum(gpu.slots for gpu in self._gpus), -1
        # As stated if the longest wait is stated as well; else that of the backend is, and this in proportion.
        if tier.shed_wait_ms is not None:
            scale = 1.0 if tier.max_queue_ms else self.request.wait_scale
            shed_wait_ms = round(tier.shed_wait_ms * scale)
        return TierLimit(
            name=tier.name,
            rate=rate,
            # Of all cells: when the load of one rises, its part of the capacity follows with the next observations.
            burst=max(1.0, self.ceiling(tier.name) * TIER_BURST_S),
            max_depth=tier.max_queue_depth,
            ahead=[other.name for other in snapshot.tiers if other.priority <= tier.priority],
            shed_depth=-1 if tier.shed_depth is None else tier.shed_depth,
            shed_wait_ms=shed_wait_ms,
            share=share,
            shadow=tier.shadow,
            # One batch; with slots few, because what is in a tier queue is not in the fair order of customers.
            places=slot_places(slots) if slots else batch_size(snapshot, self._pool) or PLACES,
            open=slots / OPEN_PART,
        )


def _needs(observation: Observation) -> dict[str, float]:
    """The rate that each tier of a pool in a cell needs, requests/s: for its arrivals and for what waits."""
    needs = _total(observation.gateways, lambda stats: stats.demand_rps)
    for name, queue in observation.tiers.items():
        needs[name] = needs.get(name, 0.0) + queue.depth / HORIZON_S
    return needs


def is_slow(worker: WorkerView) -> bool:
    """Whether the worker sends heartbeats, but its model is slower than its time limit."""
    return worker.status == "slow" and worker.age_ms < SLOW_SEEN_MS


def is_too_slow(workers: Sequence[WorkerView], unhealthy_s: float) -> bool:
    """Whether at least one worker has a model that is too slow, and no other worker can serve now or soon.

    `unhealthy_s`: for how long no worker has been healthy. A lost model process of another worker is usually replaced sooner
    than WAITING_ROOM_S.
    """
    others = [worker for worker in workers if not is_slow(worker)]
    if len(others) == len(workers) or any(worker.healthy or worker.pausing for worker in others):
        return False
    soon = any(worker.status in _SOON and worker.age_ms < SLOW_SEEN_MS for worker in others)
    return not soon or unhealthy_s > WAITING_ROOM_S


def _alone_ms(worker: WorkerView) -> float:
    """The GPU time of a request that runs alone, or with slots the mean; before it is known, the time of the batches so far.

    0: nothing was measured.
    """
    if worker.slots and worker.seen_batch > 0:
        return worker.base_ms / max(1.0, worker.seen_batch)
    return worker.base_ms + worker.item_ms if worker.seen_batch > 0 else worker.service_p95_ms or worker.model_ms


def healthy_gpus(observation: Observation) -> list[GpuRate]:
    """The reported speed of each healthy worker's model."""
    rates: list[GpuRate] = []
    for each in observation.workers:
        if not each.healthy:
            continue
        if each.seen_batch <= 0 and each.rps > 0:  # An older worker sends one value, that of full batches.
            rates.append(GpuRate(item_ms=1000 / each.rps, seen_batch=math.inf, served_rps=each.rps))
            continue
        width = max(1, each.width)
        rates.append(
            GpuRate(each.base_ms, each.item_ms, each.seen_batch, width, each.served_rps, each.fresh_batch, each.slots)
        )
    return rates


def batch_size(snapshot: Snapshot, pool: str) -> int:
    """Requests in a full batch: the pool's GPUs run all its models, so the lowest row applies."""
    return min((model.max_batch_size for model in _models(snapshot, pool)), default=0)


def slot_places(slots: int) -> int:
    """Ids in a tier queue of a pool with slots."""
    return min(MOST_SLOT_PLACES, max(1, slots // SLOTS_PER_PLACE))


def pool_load(
    observation: Observation, gpus: Sequence[GpuRate], snapshot: Snapshot, factors: Mapping[str, float]
) -> PoolLoad:
    """Whether requests are backlogged behind busy GPUs, and whether any are rejected for capacity."""
    paused = {tier.name for tier in snapshot.tiers if tier.paused}
    tiers = [tier for tier in observation.tiers.values() if tier.name not in paused]
    runs_ms = [worker.service_p95_ms for worker in observation.workers if worker.healthy and worker.service_p95_ms > 0]
    run_ms = median(runs_ms) if runs_ms else 0.0
    busy = observation.leased_batches >= sum(gpu.concurrency for gpu in gpus)
    if slots := sum(gpu.slots for gpu in gpus):
        busy = sum(worker.in_flight for worker in observation.workers if worker.healthy) >= FULL * slots
        rps = PoolRate.of(gpus, 1).full_rps
        run_ms = 1000 / rps if rps > 0 else 0.0  # Until the next slot is free.
    long_ms = max(BACKLOG_LEAST_MS, BACKLOG_RUNS * run_ms)
    late = any(tier.depth and tier.oldest_ms > long_ms for tier in tiers)
    stats = [each for gateway in observation.gateways for each in gateway.tiers.values()]
    shed_rps, arrived_rps = sum(each.shed_per_second for each in stats), sum(each.arrived_rps for each in stats)
    lowered = any(part < 1 for part in factors.values())
    return PoolLoad(
        backlogged=busy and late and run_ms > 0,
        limiting=lowered or shed_rps > LIMITING_SHARE * arrived_rps,
        run_ms=run_ms,
    )


def _prior(snapshot: Snapshot, pool: str) -> tuple[float, bool]:
    """Requests/s of a GPU by the lowest row, and whether that applies whatever is measured."""
    models = _models(snapshot, pool)
    fixed = [model for model in models if model.rps_per_gpu_fixed]
    return min((model.rps_per_gpu for model in fixed or models), default=0.0), bool(fixed)


def _target(snapshot: Snapshot, pool: str) -> float:
    return min((model.target_utilization for model in _models(snapshot, pool)), default=1.0)


def _models(snapshot: Snapshot, pool: str) -> list[Model]:
    return [model for model in snapshot.models.values() if model.enabled and model.pool == pool]


def _total(gateways: Sequence[GatewayStats], figure: Callable[[TierStats], float]) -> dict[str, float]:
    """A value of each tier, summed over the gateways."""
    total: dict[str, float] = {}
    for gateway in gateways:
        for name, stats in gateway.tiers.items():
            total[name] = total.get(name, 0.0) + figure(stats)
    return total
