"""What the page for on-call shows, as one document: made of the judged pools, once a second. Values and a pure function.

Rates are requests/s over all gateways, times milliseconds; what nothing is known of is null, never 0.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from gateway.catalog import TierRow
from gateway.finding import Status
from gateway.fleet_rates import batch_fill, busiest
from gateway.operations.health_collector import Judged
from gateway.operations.health_model import Health
from scheduler.protocol.pool_view import GpuReading, TierStats, WorkerView


class TierState(msgspec.Struct, frozen=True):
    """One tier over all pools and gateways. `share` is its part of all answers, `limit_ratio` what of its limits holds,
    `failed_rps` the calls that ended badly by our fault.
    """

    name: str
    guaranteed_share: float
    depth: int
    oldest_ms: float
    in_rps: float
    out_rps: float
    shed_rps: float
    demand_rps: float
    allocated_rps: float
    limit_ratio: float
    share: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    failed_rps: float = 0.0


class GpuState(msgspec.Struct, frozen=True):
    """What the driver says of a worker's GPU."""

    utilization: float
    memory_used_mb: int
    memory_total_mb: int
    temperature_c: int
    fault: str
    note: str = ""


class CustomerState(msgspec.Struct, frozen=True):
    """One of the customers that ask most now, over all pools and gateways."""

    name: str
    tier: str
    rps: float


class WorkerState(msgspec.Struct, frozen=True):
    """One worker; `age_ms` since its last heartbeat. `pausing`: not healthy for a moment, as it says itself.

    `capacity_rps` is its part of its pool's capacity; `cordoned`: PostgreSQL says that it is to claim nothing.
    """

    id: str
    pool: str
    status: str
    healthy: bool
    utilization: float
    in_flight: int
    age_ms: int
    rps: float
    service_p95_ms: float
    backend: str
    version: str
    gpu: GpuState | None
    capacity_rps: float = 0.0
    cordoned: bool = False
    pausing: bool = False
    model_pid: int = 0


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Something changed. `level`: `good`, `bad` or `news`."""

    at_ms: int
    level: str
    text: str


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The whole. `look_age_s`: how old what was seen in Redis is, null where nothing ever was. `batch_fill`: how full batches
    are, 0..1, null where none ran.
    """

    at_ms: int
    gateway: str
    status: Status
    reasons: list[str]
    redis_problem: str | None
    look_age_s: float | None
    in_rps: float
    out_rps: float
    shed_rps: float
    demand_rps: float
    capacity_rps: float
    capacity_evidence: str
    capacity_confidence: float
    queue_depth: int
    healthy_gpus: int
    total_gpus: int
    gpu_utilization: float
    padding_waste: float
    batch_fill: float | None
    dlq: int
    audit_lag_ms: int | None
    tiers: list[TierState]
    workers: list[WorkerState]
    customers: list[CustomerState]
    gateways: list[str]
    events: list[Event]


def state(
    judged: Mapping[str, Judged],
    whole: Health,
    rows: Sequence[TierRow],
    *,
    at_ms: int,
    gateway: str,
    cordoned: Collection[str] = (),
) -> State:
    """The document, without events. `whole` is the health of all pools together, `rows` the catalog's tiers."""
    seen = {pool: each.inputs.observation for pool, each in judged.items()}
    gateways = [gateway for look in seen.values() if look for gateway in look.gateways]
    stats = {row.name: [gateway.tiers[row.name] for gateway in gateways if row.name in gateway.tiers] for row in rows}
    answered = sum(each.answered_rps for several in stats.values() for each in several)
    tiers = [_tier(row, stats[row.name], whole, answered) for row in rows]
    problems = [each.inputs.redis_problem for each in judged.values() if each.inputs.redis_problem is not None]
    return State(
        at_ms=at_ms,
        gateway=gateway,
        status=whole["status"],
        reasons=whole["reasons"],
        redis_problem=problems[0] if problems else None,
        look_age_s=_oldest_s([each.inputs.look_age_s for each in judged.values()]),
        in_rps=_total(tier.in_rps for tier in tiers),
        out_rps=_total(tier.out_rps for tier in tiers),
        shed_rps=_total(tier.shed_rps for tier in tiers),
        demand_rps=_total(tier.demand_rps for tier in tiers),
        capacity_rps=whole["capacity_rps"],
        capacity_evidence=whole["capacity_evidence"],
        capacity_confidence=whole["capacity_confidence"],
        queue_depth=whole["queue_depth"],
        healthy_gpus=whole["healthy_gpus"],
        total_gpus=whole["total_gpus"],
        gpu_utilization=whole["gpu_utilization"],
        padding_waste=whole["padding_waste"],
        batch_fill=batch_fill(gateways),
        dlq=whole["dlq"],
        audit_lag_ms=whole["audit_lag_ms"],
        tiers=tiers,
        workers=[each for pool, one in judged.items() for each in _workers(pool, one, cordoned)],
        customers=[CustomerState(*each) for each in busiest(gateways)],
        gateways=sorted({each.gateway_id for each in gateways}),
        events=[],
    )


def _total(rates: Iterable[float]) -> float:
    return round(sum(rates), 3)


def _oldest_s(ages_s: Sequence[float | None]) -> float | None:
    known = [age_s for age_s in ages_s if age_s is not None]
    return round(max(known), 2) if known and len(known) == len(ages_s) else None


def _tier(row: TierRow, stats: Sequence[TierStats], whole: Health, answered_rps: float) -> TierState:
    health = whole["tiers"][row.name]
    out_rps = _total(each.answered_rps for each in stats)
    return TierState(
        name=row.name,
        guaranteed_share=row.guaranteed_share,
        depth=health["depth"],
        oldest_ms=health["oldest_ms"],
        in_rps=_total(each.arrived_rps for each in stats),
        out_rps=out_rps,
        shed_rps=health["shed_per_second"],
        demand_rps=_total(each.demand_rps for each in stats),
        allocated_rps=health["allocated_rps"],
        limit_ratio=health["effective_limit_ratio"],
        share=round(out_rps / answered_rps, 4) if answered_rps else 0.0,
        # The slowest gateway's: percentiles cannot be added, and on-call wants the worst.
        p50_ms=max((each.p50_ms for each in stats), default=0.0) or None,
        p95_ms=max((each.p95_ms for each in stats), default=0.0) or None,
        p99_ms=max((each.p99_ms for each in stats), default=0.0) or None,
        failed_rps=_total(each.failed_rps for each in stats),
    )


def _workers(pool: str, judged: Judged, cordoned: Collection[str]) -> list[WorkerState]:
    look = judged.inputs.observation
    workers = sorted(look.workers, key=lambda worker: worker.id) if look else []
    parts = parts_of(judged.inputs.capacity_rps, workers)
    return [_worker(pool, each, parts.get(each.id, 0.0), cordoned) for each in workers]


def parts_of(capacity_rps: float, workers: Sequence[WorkerView]) -> dict[str, float]:
    """What each healthy worker adds to the capacity, requests/s; one that is not measured counts as the mean of the others."""
    rates = {worker.id: worker.rps for worker in workers if worker.healthy}
    measured = [rate for rate in rates.values() if rate > 0]
    assumed = sum(measured) / len(measured) if measured else 1.0
    total = sum(rate or assumed for rate in rates.values())
    return {each: round(capacity_rps * (rate or assumed) / total, 1) for each, rate in rates.items()}


def _worker(pool: str, worker: WorkerView, capacity_rps: float, cordoned: Collection[str]) -> WorkerState:
    return WorkerState(
        id=worker.id,
        pool=pool,
        status=worker.status,
        healthy=worker.healthy,
        utilization=worker.utilization,
        in_flight=worker.in_flight,
        age_ms=round(worker.age_ms),
        rps=round(worker.rps, 1),
        service_p95_ms=worker.service_p95_ms,
        backend=worker.backend,
        version=worker.model_version,
        gpu=None if worker.gpu is None else _gpu(worker.gpu),
        capacity_rps=capacity_rps,
        cordoned=worker.id in cordoned,
        pausing=worker.pausing,
        model_pid=worker.model_pid,
    )


def _gpu(gpu: GpuReading) -> GpuState:
    return GpuState(gpu.utilization, gpu.memory_used_mb, gpu.memory_total_mb, gpu.temperature_c, gpu.fault, gpu.note)
