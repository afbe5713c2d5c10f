"""The gateway's use of ratelimit/: observations and demand in, tier limits and each tier's factor out.

Stale input fails in a declared direction: the last capacity holds for 10 s, then it falls to what one GPU of the
pool is said to do. A pool with no healthy GPU keeps its last capacity for the two seconds in which it may come back;
then requests are refused outright.
"""

from collections.abc import Mapping, Sequence

from gateway.admitter import Limits
from gateway.catalog_view import SnapshotView, TierRow
from ratelimit.capacity import capacity_rps
from ratelimit.shares import TierShare, allocate, factor
from ratelimit.slew import relax
from scheduler.admission import TierLimit
from scheduler.observation import Observation

HOLD_S = 10.0
WAITING_ROOM_S = 2.0
MEMORY_FULL = 0.8  # From this part of its memory limit on, Redis is given no new requests,
MEMORY_EASED = 0.75  # until it is under this one: what is queued must always have room to end.
TIER_BURST_S = 1.0  # A tier's bucket holds what its rate gives in so long.


class LiveLimits:
    """The limits in force. Times are monotonic seconds; nothing here does I/O."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._snapshot: SnapshotView | None = None
        self._rates: dict[str, float] = {}
        self._factors: dict[str, float] = {}
        self._limits = Limits((), 0.0)
        self._observed_at: float | None = None
        self._no_gpu_since: float | None = None
        self.capacity_rps = 0.0
        self.memory_share = 0.0
        self.short_of_memory = False

    def observe(self, observation: Observation, snapshot: SnapshotView, now: float) -> None:
        """Take a fresh look at the pool and allocate anew."""
        elapsed_s = now - self._observed_at if self._observed_at is not None else 0.0
        self._observed_at = now
        rates = [worker.rps for worker in observation.workers if worker.healthy]
        if rates:
            self._no_gpu_since = None
            self.capacity_rps = _capacity(rates, snapshot, self._pool)
        elif self._no_gpu_since is None:
            self._no_gpu_since = now
        if self.capacity_rps <= 0:
            self.capacity_rps = _floor(snapshot, self._pool)
        self._allocate(snapshot, _demand(observation), elapsed_s)

    def lapse(self, snapshot: SnapshotView, now: float) -> None:
        """There is no fresh look: hold the last one, later fall to the floor. Of Redis' memory nothing is known then."""
        if self._observed_at is None or now - self._observed_at > HOLD_S:
            self.capacity_rps = _floor(snapshot, self._pool)
            self.memory(0.0)
            self._allocate(snapshot, {}, 0.0)

    def current(self, snapshot: SnapshotView) -> Limits:
        """What to tell admission. A changed catalog is obeyed at once, not with the next observation."""
        if snapshot is not self._snapshot:
            if self.capacity_rps <= 0:
                self.capacity_rps = _floor(snapshot, self._pool)
            self._adopt(snapshot)
        return self._limits

    def factor(self, tier: str) -> float:
        """The part of its base limit that each key of the tier has now, 0..1."""
        return self._factors.get(tier, 1.0)

    def no_gpu(self, now: float) -> bool:
        """Whether there has been no healthy GPU for longer than one may be waited for."""
        return self._no_gpu_since is not None and now - self._no_gpu_since > WAITING_ROOM_S

    def memory(self, share: float) -> None:
        """Redis says which part of its memory limit it uses, 0..1; 0 where it has none."""
        self.memory_share = share
        self.short_of_memory = share >= (MEMORY_EASED if self.short_of_memory else MEMORY_FULL)

    def _allocate(self, snapshot: SnapshotView, demand: Mapping[str, float], elapsed_s: float) -> None:
        shares = [TierShare(tier.name, tier.priority, tier.guaranteed_share) for tier in snapshot.tiers]
        self._rates = allocate(self.capacity_rps, shares, demand)
        self._factors = {
            name: relax(self._factors.get(name, 1.0), factor(rate, demand.get(name, 0.0)), elapsed_s)
            for name, rate in self._rates.items()
        }
        self._adopt(snapshot)

    def _adopt(self, snapshot: SnapshotView) -> None:
        self._snapshot = snapshot
        tiers = [self._tier_limit(tier, snapshot.tiers) for tier in snapshot.tiers]
        self._limits = Limits(tiers, self.capacity_rps)

    def _tier_limit(self, tier: TierRow, tiers: Sequence[TierRow]) -> TierLimit:
        rate = self._rates.get(tier.name, self.capacity_rps)
        return TierLimit(
            name=tier.name,
            rate=rate,
            burst=max(1.0, rate * TIER_BURST_S),
            max_depth=tier.max_queue_depth,
            ahead=[other.name for other in tiers if other.priority <= tier.priority],
            shed_depth=-1 if tier.shed_depth is None else tier.shed_depth,
            shed_wait_ms=-1 if tier.shed_wait_ms is None else tier.shed_wait_ms,
        )


def _capacity(rates: Sequence[float], snapshot: SnapshotView, pool: str) -> float:
    models = [model for model in snapshot.models.values() if model.enabled and model.pool == pool]
    # A pool's GPUs run all its models, so the most careful row speaks for the pool.
    prior = min((model.rps_per_gpu for model in models), default=0.0)
    target = min((model.target_utilization for model in models), default=1.0)
    return capacity_rps(rates, prior, target)


def _floor(snapshot: SnapshotView, pool: str) -> float:
    """What one GPU whose rate is not measured would add."""
    return _capacity([0.0], snapshot, pool)


def _demand(observation: Observation) -> dict[str, float]:
    demand: dict[str, float] = {}
    for gateway in observation.gateways:
        for name, stats in gateway.tiers.items():
            demand[name] = demand.get(name, 0.0) + stats.demand_rps
    return demand
