"""The gauges: observations of the pools and of the catalog. Observations that are too old are omitted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gateway.circuit_breaker import BreakerState
from ledger.catalog.follower import Catalog
from scheduler.protocol.pool_view import Observation, WorkerView

STALE_S = 10.0
MAX_WORKERS = 512
MEBIBYTE = 1 << 20
WORKER_STATES = (
    *("starting", "ready", "busy", "paused", "away", "slow", "cordoned"),
    *("draining", "down", "quarantined", "failed", "unknown"),
)
BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}

Gauge = tuple[str, tuple[str, ...], float]
"""Name, values of the labels, value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """The observed values of one pool. `factors`: tier -> effective part of its limits; `demand`: requests/s.
    `fairness`: tier -> Jain's index.
    """

    pool: str
    observation: Observation | None
    age_s: float | None
    capacity_rps: float
    factors: Mapping[str, float]
    demand: Mapping[str, float]
    fairness: Mapping[str, float]
    memory_share: float
    audit_lag_ms: int | None
    recommended_workers: int
    breakers: Mapping[str, str] = field(default_factory=dict)


def gauges(figures: PoolFigures) -> Iterator[Gauge]:
    """All gauges of one pool."""
    pool = figures.pool
    yield "tierlane_capacity_requests_per_second", (pool,), figures.capacity_rps
    yield "tierlane_recommended_workers", (pool,), figures.recommended_workers
    for tier, factor in figures.factors.items():
        yield "tierlane_effective_limit_ratio", (pool, tier), factor
    for target, state in list(figures.breakers.items())[:MAX_WORKERS]:
        yield "tierlane_circuit_state", (pool, target), BREAKER_VALUES[BreakerState(state)]
    if figures.audit_lag_ms is not None:
        yield "tierlane_audit_lag_seconds", (pool,), figures.audit_lag_ms / 1000
    if figures.age_s is None or (observation := figures.observation) is None:
        return
    yield "tierlane_look_age_seconds", (pool,), figures.age_s
    if figures.age_s > STALE_S:
        return
    yield "tierlane_redis_memory_ratio", (pool,), figures.memory_share
    for name, queue in observation.tiers.items():
        yield "tierlane_queue_depth", (pool, name), queue.depth
        yield "tierlane_queue_oldest_age_seconds", (pool, name), queue.oldest_ms / 1000
    for name, queue in observation.background.items():
        yield "tierlane_background_depth", (pool, name), queue.depth
    for name, fairness in figures.fairness.items():
        yield "tierlane_fairness_ratio", (pool, name), fairness
    for name, demand_rps in figures.demand.items():
        yield "tierlane_demand_requests_per_second", (pool, name), demand_rps
    yield "tierlane_gateways", (pool,), len(observation.gateways)
    yield "tierlane_dlq_size", (pool,), observation.dlq
    yield "tierlane_audit_pending_records", (pool,), observation.outbox
    yield from _workers(pool, observation.workers[:MAX_WORKERS])


def catalog_gauges(catalog: Catalog) -> Iterator[Gauge]:
    """The age of the catalog, and the objectives of its tiers."""
    yield "tierlane_catalog_age_seconds", (), catalog.age_s()
    for tier in catalog.snapshot.tiers if catalog.snapshot else ():
        if tier.slo_ms is not None:
            yield "tierlane_objective_duration_seconds", (tier.name,), tier.slo_ms / 1000
        if tier.slo_success is not None:
            yield "tierlane_objective_success_ratio", (tier.name,), tier.slo_success


def _workers(pool: str, workers: list[WorkerView]) -> Iterator[Gauge]:
    counts = dict.fromkeys(WORKER_STATES, 0)
    for worker in workers:
        counts[worker.status if worker.status in counts else "unknown"] += 1
        yield "tierlane_gpu_healthy", (pool, worker.id), int(worker.healthy)
        yield "tierlane_gpu_utilization_ratio", (pool, worker.id), worker.utilization
        yield "tierlane_inflight_requests", (pool, worker.id), worker.in_flight
        if worker.slots:
            yield "tierlane_worker_slots", (pool, worker.id), worker.slots
        if worker.gpu is not None:
            yield "tierlane_gpu_memory_bytes", (pool, worker.id), worker.gpu.memory_used_mb * MEBIBYTE
    for state, count in counts.items():
        yield "tierlane_workers", (pool, state), count
