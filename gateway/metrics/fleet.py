"""What a gateway last saw of one pool, as gauges: a pure function. Nothing is told that is too old to be believed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gateway.circuit_breaker import BreakerState
from scheduler.protocol.pool_view import Observation, WorkerView

STALE_S = 10.0
MOST_WORKERS = 512
MEBIBYTE = 1 << 20
STATES = (
    *("starting", "ready", "busy", "paused", "away", "cordoned"),
    *("draining", "down", "quarantined", "failed", "unknown"),
)
CIRCUIT = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}

Gauge = tuple[str, tuple[str, ...], float]
"""A metric's name, its labels' values, and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLook:
    """Everything that is told of one pool. `factors`: tier -> part of its limits in force; `demand`: requests/s."""

    pool: str
    observation: Observation | None
    age_s: float | None
    capacity_rps: float
    factors: Mapping[str, float]
    demand: Mapping[str, float]
    memory_share: float
    audit_lag_ms: int | None
    recommended_workers: int
    breakers: Mapping[str, str] = field(default_factory=dict)


def gauges(look: PoolLook) -> Iterator[Gauge]:
    """All of one pool."""
    pool = look.pool
    yield "tierlane_capacity_requests_per_second", (pool,), look.capacity_rps
    yield "tierlane_recommended_workers", (pool,), look.recommended_workers
    for tier, part in look.factors.items():
        yield "tierlane_effective_limit_ratio", (pool, tier), part
    for target, state in list(look.breakers.items())[:MOST_WORKERS]:
        yield "tierlane_circuit_state", (pool, target), CIRCUIT[BreakerState(state)]
    if look.audit_lag_ms is not None:
        yield "tierlane_audit_lag_seconds", (pool,), look.audit_lag_ms / 1000
    if look.age_s is None or look.observation is None:
        return
    yield "tierlane_look_age_seconds", (pool,), look.age_s
    if look.age_s <= STALE_S:
        yield "tierlane_redis_memory_ratio", (pool,), look.memory_share
        yield from _queues(look, look.observation)
        yield from _workers(pool, look.observation.workers[:MOST_WORKERS])


def _queues(look: PoolLook, seen: Observation) -> Iterator[Gauge]:
    pool = look.pool
    for name, tier in seen.tiers.items():
        yield "tierlane_queue_depth", (pool, name), tier.depth
        yield "tierlane_queue_oldest_age_seconds", (pool, name), tier.oldest_ms / 1000
    for name, demand_rps in look.demand.items():
        yield "tierlane_demand_requests_per_second", (pool, name), demand_rps
    yield "tierlane_gateways", (pool,), len(seen.gateways)
    yield "tierlane_dlq_size", (pool,), seen.dlq
    yield "tierlane_audit_pending_records", (pool,), seen.outbox


def _workers(pool: str, workers: list[WorkerView]) -> Iterator[Gauge]:
    counts = dict.fromkeys(STATES, 0)
    for worker in workers:
        counts[worker.status if worker.status in counts else "unknown"] += 1
        yield "tierlane_gpu_healthy", (pool, worker.id), int(worker.healthy)
        yield "tierlane_gpu_utilization_ratio", (pool, worker.id), worker.utilization
        yield "tierlane_inflight_requests", (pool, worker.id), worker.in_flight
        if worker.gpu is not None:
            yield "tierlane_gpu_memory_bytes", (pool, worker.id), worker.gpu.memory_used_mb * MEBIBYTE
    for state, count in counts.items():
        yield "tierlane_workers", (pool, state), count
