"""The dashboard state: one document, made once a second from the health of the pools.

All functions are pure. Rates are requests/s over all gateways, times are milliseconds; unknown values are null, never 0.
"""

from collections.abc import Mapping, Sequence

import msgspec

from gateway.limits.gpu_time import tier_gpu_time
from gateway.operations.figures import total, view
from gateway.operations.health.collector import CollectedHealth
from gateway.operations.health.model import Status
from gateway.operations.health.pool_state import MeasuredPool, MeasuredTier
from ledger.batches import OpenBatches
from ledger.catalog.snapshot import NO_CORDONS, Tier, WorkerCordon
from scheduler.protocol.pool_view import GatewayStats, WorkerView

MAX_CUSTOMERS = 5


class TierState(msgspec.Struct, frozen=True):
    """One tier over all pools and gateways.

    `share`: of all responses; `limit_ratio`: the share of its limits in force; `failed_rps`: SLO failures. `fairness`: as in
    TierHealth; `background_depth`: queued jobs; `errors_60s`: all errors of the last minute by code.
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
    shed_depth: int | None = None
    max_queue_depth: int = 0
    slo_ms: float | None = None
    fairness: float = 1.0
    background_depth: int = 0
    errors_60s: dict[str, int] = {}


class GpuState(msgspec.Struct, frozen=True):
    """A worker's GPU as reported by its driver. `name` and `address`: as in GpuReading."""

    utilization: float
    memory_used_mb: int
    memory_total_mb: int
    temperature_c: int
    fault: str
    note: str = ""
    name: str = ""
    address: str = ""


class CustomerState(msgspec.Struct, frozen=True):
    """One of the top customers, over all pools and gateways. `gpu_share`: of the GPU time of its tier in the last minute."""

    name: str
    tier: str
    rps: float
    gpu_ms: float = 0.0
    gpu_share: float = 0.0


class WorkerState(msgspec.Struct, frozen=True):
    """One worker. `age_ms`: since its last heartbeat. `pausing`: briefly not healthy, as the worker reported. `slots`: requests
    that may run at a time, 0 if it runs batches.

    `capacity_rps`: its part of its pool's capacity. `cordoned`: according to PostgreSQL, it must not claim batches; `cordon`: by
    whom and why. `reason` and `cause`: as in WorkerReport, as are `host` and `pid`.
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
    slots: int = 0
    slots_source: str = ""
    reason: str = ""
    cause: str = ""
    host: str = ""
    pid: int = 0
    cordon: str = ""


class DashboardEvent(msgspec.Struct, frozen=True, array_like=True):
    """A change of the state. `level`: `good`, `bad` or `news`. `pool`: "" if it concerns all pools.

    `kind`: status, redis, limits, dead_letters, loss, restart, worker, cordon, config or gateway.
    """

    at_ms: int
    level: str
    text: str
    kind: str = ""
    pool: str = ""


class HealthReason(msgspec.Struct, frozen=True):
    """One reason of health: what is wrong, what to do, and the page that says more; "" where a check has none."""

    check: str
    reason: str
    code: str
    action: str
    runbook: str


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one pool. `batch_fill`: fill of the batches, 0..1, null if none ran. `slots`, `running`: as in health."""

    name: str
    status: Status
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
    tiers: list[TierState]
    slots: int = 0
    running: int = 0


class DashboardState(PoolState, frozen=True, kw_only=True):
    """The document; its figures are those of all pools, `pools` has those of each if there are several.

    `installation`: its name, "" if it has none. `look_age_s`: age of the last observation of Redis, null before the first.
    `batches`: those of /v1/batches, null if unknown.
    """

    at_ms: int
    gateway: str
    installation: str
    reasons: list[str]
    problems: list[HealthReason]
    redis_problem: str | None
    look_age_s: float | None
    audit_lag_ms: int | None
    workers: list[WorkerState]
    pools: list[PoolState] = []
    customers: list[CustomerState]
    gateways: list[str]
    events: list[DashboardEvent]
    batches: OpenBatches | None = None


def state(
    pools: Mapping[str, CollectedHealth],
    whole: MeasuredPool,
    rows: Sequence[Tier],
    *,
    at_ms: int,
    gateway: str,
    installation: str = "",
    cordons: Mapping[str, WorkerCordon] = NO_CORDONS,
    batches: OpenBatches | None = None,
) -> DashboardState:
    """The document, without events. `whole`: the state of all pools together; `rows`: the catalog's tiers."""
    observations = [each.inputs.observation for each in pools.values()]
    gateways = [gateway for seen in observations if seen for gateway in seen.gateways]
    ages_s = [each.inputs.look_age_s for each in pools.values()]
    known_s = [age_s for age_s in ages_s if age_s is not None]
    redis_problems = [each.inputs.redis_problem for each in pools.values() if each.inputs.redis_problem is not None]
    return DashboardState(
        **msgspec.structs.asdict(_pool("", whole, rows)),
        at_ms=at_ms,
        gateway=gateway,
        installation=installation,
        reasons=whole["reasons"],
        problems=problems(whole),
        redis_problem=redis_problems[0] if redis_problems else None,
        look_age_s=round(max(known_s), 2) if known_s and len(known_s) == len(ages_s) else None,
        audit_lag_ms=whole["audit_lag_ms"],
        workers=[worker for pool, each in pools.items() for worker in _workers(pool, each, cordons)],
        customers=top_customers(gateways),
        gateways=sorted({each.gateway_id for each in gateways}),
        events=[],
        batches=batches,
        pools=[_pool(name, each.state, rows) for name, each in pools.items()] if len(pools) > 1 else [],
    )


def problems(whole: MeasuredPool) -> list[HealthReason]:
    """The reasons in their order, each with the action and the runbook of the check that reports it."""
    found: dict[str, HealthReason] = {}
    for name, checks in whole["checks"].items():
        for check in checks:
            if reason := check.get("output"):
                details = (check.get("code", ""), check.get("action", ""), check.get("runbook", ""))
                found.setdefault(reason, HealthReason(name, reason, *details))
    reasons: list[HealthReason] = []
    for reason in whole["reasons"]:
        # With several pools, a reason may be that of a check behind the name of its pool.
        known = found.get(reason) or next((each for text, each in found.items() if reason.endswith(f": {text}")), None)
        reasons.append(msgspec.structs.replace(known or HealthReason("", "", "", "", ""), reason=reason))
    return reasons


def batch_fill(filled_per_second: float, batches_per_second: float) -> float | None:
    """Fill of the batches of the last two seconds, 0..1; None if there were none."""
    return round(min(1.0, filled_per_second / batches_per_second), 4) if batches_per_second else None


def top_customers(gateways: Sequence[GatewayStats]) -> list[CustomerState]:
    """The customers with the most GPU time in the last minute, then those with the highest rates."""
    rates: dict[tuple[str, str], float] = {}
    for each in gateways:
        for customer in each.busiest:
            key = (customer.name, customer.tier)
            rates[key] = rates.get(key, 0.0) + customer.rps
    used: dict[tuple[str, str], tuple[float, float]] = {}
    for tier in dict.fromkeys(timed.tier for each in gateways for timed in each.gpu_times):
        gpu_time = tier_gpu_time(tier, gateways)
        used |= {(each.name, tier): (each.gpu_ms, gpu_time.share(each.gpu_ms)) for each in gpu_time.customers}
    found = [(used.get(key, (0.0, 0.0)), rates.get(key, 0.0), key) for key in {**used, **rates}]
    found.sort(key=lambda each: (-each[0][0], -each[1], each[2]))
    return [
        CustomerState(*key, round(rps, 1), round(gpu_ms, 1), round(share, 4))
        for (gpu_ms, share), rps, key in found[:MAX_CUSTOMERS]
    ]


def _pool(name: str, measured: MeasuredPool, rows: Sequence[Tier]) -> PoolState:
    """The figures of one pool, or of several together."""
    known = [(row, tier) for row in rows if (tier := measured["tiers"].get(row.name))]
    out_rps = total([tier["out_rps"] for _, tier in known])
    return view(
        PoolState,
        measured,
        name=name,
        in_rps=total([tier["in_rps"] for _, tier in known]),
        out_rps=out_rps,
        shed_rps=total([tier["shed_per_second"] for _, tier in known]),
        demand_rps=total([tier["demand_rps"] for _, tier in known]),
        batch_fill=batch_fill(measured["filled_per_second"], measured["batches_per_second"]),
        tiers=[_tier(row, tier, out_rps) for row, tier in known],
    )


def _tier(row: Tier, measured: MeasuredTier, out_rps: float) -> TierState:
    return view(
        TierState,
        measured,
        name=row.name,
        guaranteed_share=row.guaranteed_share,
        shed_rps=measured["shed_per_second"],
        limit_ratio=measured["effective_limit_ratio"],
        share=round(measured["out_rps"] / out_rps, 4) if out_rps else 0.0,
        p50_ms=measured["p50_ms"] or None,
        p95_ms=measured["p95_ms"] or None,
        p99_ms=measured["p99_ms"] or None,
        shed_depth=row.shed_depth,
        max_queue_depth=row.max_queue_depth,
    )


def _workers(pool: str, health: CollectedHealth, cordons: Mapping[str, WorkerCordon]) -> list[WorkerState]:
    seen = health.inputs.observation
    workers = sorted(seen.workers, key=lambda worker: worker.id) if seen else []
    capacities = capacity_by_worker(health.inputs.capacity_rps, workers)
    return [
        view(
            WorkerState,
            worker,
            pool=pool,
            age_ms=round(worker.age_ms),
            rps=round(worker.rps, 1),
            version=worker.model_version,
            gpu=None if worker.gpu is None else view(GpuState, worker.gpu),
            capacity_rps=capacities.get(worker.id, 0.0),
            cordoned=worker.id in cordons,
            cordon=str(cordons.get(worker.id, "")),
        )
        for worker in workers
    ]


def capacity_by_worker(capacity_rps: float, workers: Sequence[WorkerView]) -> dict[str, float]:
    """The part of each healthy worker in the capacity, requests/s. A worker without a measured rate counts as the mean."""
    rates = {worker.id: worker.rps for worker in workers if worker.healthy}
    measured = [rate for rate in rates.values() if rate > 0]
    assumed = sum(measured) / len(measured) if measured else 1.0
    total = sum(rate or assumed for rate in rates.values())
    return {each: round(capacity_rps * (rate or assumed) / total, 1) for each, rate in rates.items()}
