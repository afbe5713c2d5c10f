"""Advice on the size of a pool, once a second: the policy of scheduler/autoscale.py, applied to this gateway's observations.

It makes no calls to Redis: it uses the heartbeat's observation and the limits that are computed from that. All gateways
observe the same and give the same advice, except that each one measures by itself how long a condition holds. So a gateway
that has just started, or could not reach Redis, recommends a step later than the others.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

from gateway.heartbeat import GatewayHeartbeat
from gateway.limits.capacity import LiveLimits
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Model, Snapshot
from ratelimit.capacity import CapacityEvidence
from scheduler.autoscale import Advice, Autoscaler, Sample, ScaleRules
from scheduler.protocol.pool_view import Observation
from scheduler.tasks import next_tick

INTERVAL_S = 1.0
STALE_S = 2.0


class ScaleInputs(TypedDict):
    """The inputs of the advice. Rates in requests/s; `busy`, `utilization` and `target_utilization` 0..1; wait in ms.

    `busy`: the share of time in which workers run batches. `utilization`: at most the demand's share of the workers' rate,
    because a worker may be busy with batches of one.
    """

    backlog: dict[str, int]
    demand_rps: float
    capacity_rps: float
    rps_per_worker: float
    target_utilization: float
    target_wait_ms: float
    busy: float
    utilization: float
    known_workers: int


class LastStep(TypedDict):
    """The last change of the advice, and its age in seconds."""

    direction: Literal["up", "down"]
    before: int
    after: int
    reason: str
    age_s: float


class PoolScale(TypedDict):
    """One pool: healthy workers, recommended workers, reason. `last_step` and `inputs` are null until there are any."""

    current_workers: int
    recommended_workers: int
    min_workers: int
    max_workers: int
    reason: str
    last_step: LastStep | None
    inputs: ScaleInputs | None


class Scale(PoolScale):
    """The gateway's own pool, and all pools in `pools`."""

    pools: dict[str, PoolScale]


class ScaleAdvice:
    """The advice for one pool. `recommended` and `healthy` are also metrics. `clock`: monotonic seconds."""

    def __init__(
        self,
        rules: ScaleRules,
        pool: str,
        *,
        catalog: Catalog,
        heartbeat: GatewayHeartbeat,
        limits: LiveLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._pool = pool
        self._catalog = catalog
        self._beat = heartbeat
        self._limits = limits
        self._clock = clock
        self._policy = Autoscaler(rules)
        self._advice = Advice(0, rules.least, "no observation yet", None)
        self._inputs: ScaleInputs | None = None
        self._measured_rps = 0.0

    async def run(self) -> None:
        """Update once a second; never returns."""
        while True:
            self.update()
            await next_tick(INTERVAL_S)

    def update(self) -> None:
        """Apply the policy to the latest observation."""
        seen, age_s, snapshot = self._beat.whole, self._beat.age_s(), self._catalog.snapshot
        if seen is None or snapshot is None or age_s is None or age_s > STALE_S:
            self._advice = self._policy.hold("the pool cannot be observed") or self._advice
            return
        sample, self._inputs = self._sample(seen, snapshot)
        self._advice = self._policy.update(sample, self._clock())

    @property
    def healthy(self) -> int:
        """Healthy workers at the last update."""
        return self._advice.healthy

    @property
    def recommended(self) -> int:
        """The recommended number of workers."""
        return self._advice.recommended

    def document(self) -> PoolScale:
        """The pool's part of `/internal/autoscale`."""
        advice = self._advice
        return {
            "current_workers": advice.healthy,
            "recommended_workers": advice.recommended,
            "min_workers": self._rules.least,
            "max_workers": self._rules.most,
            "reason": advice.reason,
            "last_step": self._last_step(),
            "inputs": self._inputs,
        }

    def _last_step(self) -> LastStep | None:
        step = self._advice.last
        if step is None:
            return None
        return {
            "direction": step.direction,
            "before": step.before,
            "after": step.after,
            "reason": step.reason,
            "age_s": round(max(0.0, self._clock() - step.at_s), 1),
        }

    def _sample(self, seen: Observation, snapshot: Snapshot) -> tuple[Sample, ScaleInputs]:
        models = [model for model in snapshot.models.values() if model.enabled and model.pool == self._pool]
        workers = [worker for worker in seen.workers if worker.healthy]
        demand = sum(self._limits.demand(tier.name) for tier in snapshot.tiers)
        rate, measured = self._rate(models)
        busy = sum(worker.utilization for worker in workers) / len(workers) if workers else 0.0
        used = min(busy, demand / (rate * len(workers))) if measured and workers else busy
        target = min((model.target_utilization for model in models), default=1.0)
        backlog = {name: tier.depth for name, tier in seen.tiers.items()}
        inputs: ScaleInputs = {
            "backlog": backlog,
            "demand_rps": round(demand, 3),
            "capacity_rps": round(rate * target * len(workers), 3),
            "rps_per_worker": round(rate, 3),
            "target_utilization": target,
            "target_wait_ms": self._rules.target_wait_s * 1000,
            "busy": round(busy, 4),
            "utilization": round(used, 4),
            "known_workers": seen.total_gpus,
        }
        return Sample(len(workers), seen.total_gpus, backlog, demand, rate, target, used), inputs

    def _rate(self, models: Sequence[Model]) -> tuple[float, bool]:
        """The rate of one worker, requests/s, and whether it was ever measured; else the value of the models' rows."""
        estimate, gpus = self._limits.estimate, self._limits.healthy_gpus
        if estimate.evidence in (CapacityEvidence.MEASURED, CapacityEvidence.FIXED) and gpus:
            self._measured_rps = estimate.rps / gpus
        prior = min((model.rps_per_gpu for model in models), default=0.0)
        return self._measured_rps or prior, self._measured_rps > 0


def scale_document(found: Mapping[str, PoolScale]) -> Scale:
    """The document of `/internal/autoscale`: the first pool's fields, and all pools."""
    first = next(iter(found.values()))
    return {**first, "pools": dict(found)}
