"""The health checks: a pure function from the gateway's last observations to the state of a pool.

`down` means that requests cannot be served now, `degraded` that they are served although there is a problem. Every
reason is a sentence for the operator. The figures of a tier (limits, retries, rejections) cover all gateways.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from gateway.circuit_breaker import BreakerState
from gateway.direct.mode import DirectView
from gateway.limits.capacity import MEMORY_EASED, is_slow
from gateway.limits.refusals import failing_customer
from gateway.operations.figures import total
from gateway.operations.health.advice import finding, problem, with_impact
from gateway.operations.health.gateway_losses import LostGateway
from gateway.operations.health.model import LEVELS, Check, HealthFinding, Status, shortened
from gateway.operations.health.outcomes import (
    CauseInputs,
    TierObjective,
    TierResult,
    failing_tiers,
    missed_objectives,
    refused_customers,
    tier_results,
)
from gateway.operations.health.pool_state import MeasuredPool, MeasuredTier
from gateway.operations.health.restarts import Restart
from gateway.operations.health.role_checks import ended_tasks, lost_gateways, repaired_keys, restarted, scheduling
from gateway.operations.health.tiers import (
    Obstacle,
    amplified_load,
    measured_tier,
    paused_tiers,
    reduced_limits,
    shedding,
)
from gateway.operations.health.worker_losses import ACTIVE_STATUSES, LostWorker
from gateway.operations.health.worker_problems import NAMED_WORKERS, reported_reasons, worker_problems
from ledger.catalog.snapshot import WorkerCordon
from ratelimit.capacity import CapacityEvidence
from scheduler.protocol.pool_view import Observation, WorkerView
from scheduler.redis_client.distance import too_far
from scheduler.tasks import EndedTask

STALE_OBSERVATION_S = 2.0
STALE_AUDIT_MS = 10_000
MOST_CAUSE = 32  # Characters of a cause, which a worker reports.

_QUEUE_CHECKS = frozenset({"gpus:healthy", "redis:look_age", "scheduler:pass_age"})
"""Checks of the queue path: not an outage while direct mode serves requests."""

_STATUS_CODES = {
    "down": "model_failed",
    "failed": "model_failed",
    "quarantined": "model_failed",
    "away": "endpoint_unavailable",
    "starting": "worker_starting",
    "cordoned": "worker_cordoned",
    "draining": "worker_stopping",
}
_WORKER_CODES = (
    *("model_too_slow", "gpu_fault", "gpu_lost", "model_failed", "endpoint_unavailable"),
    *("worker_starting", "worker_cordoned", "worker_stopping", "worker_paused"),
)
"""The worst first, as the findings of the check are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthInputs:
    """The inputs of all checks."""

    observation: Observation | None
    look_age_s: float | None
    redis_problem: str | None
    catalog_loaded: bool
    catalog_fresh: bool
    catalog_age_s: float
    catalog_problem: str | None
    subscribed: bool
    catalog_left_s: float = 900.0  # For how long known keys are served without PostgreSQL; negative: not any more.
    bad_row: bool = False  # The newest catalog was rejected because of an invalid row.
    jobs_problem: str | None = None  # Why jobs cannot be stored.
    connection_problem: str | None = None  # Why PostgreSQL accepts no new connections.
    leaving: bool
    open_requests: int = 0  # Of this gateway.
    capacity_rps: float
    capacity_evidence: CapacityEvidence = CapacityEvidence.PRIOR
    capacity_confidence: float = 0.0
    memory_share: float = 0.0  # Of Redis' memory limit, 0..1.
    short_of_memory: bool = False  # New requests are rejected because of it.
    eviction_policy: str = ""  # Redis' maxmemory-policy, "" if it is not known.
    round_trip_s: float | None = None  # To Redis; None if not yet measured.
    no_model: bool = False  # No model of the catalog is enabled.
    factors: Mapping[str, float] = field(default_factory=dict)  # Tier -> share of its limits in force, all tiers.
    paused: Collection[str] = ()  # Tiers for which no batches are formed.
    cordons: Mapping[str, WorkerCordon] = field(default_factory=dict)  # By worker.
    audit_lag_ms: int | None = 0  # None: it could not be read,
    audit_problem: str = ""  # for this reason.
    direct: DirectView | None = None
    tokens_problem: str | None = None  # Why JWTs cannot be verified with current keys.
    gpus_elsewhere: int = 0  # Healthy GPUs in other cells of the pool: they move here when they are needed.
    registering: bool = False  # Redis lost its data a moment ago: workers have yet to register again.
    losses: tuple[LostWorker, ...] = ()  # Lost workers, the latest first.
    restarts: tuple[Restart, ...] = ()  # Recently replaced model processes.
    restarts_last_minute: int = 0
    lost_gateways: tuple[LostGateway, ...] = ()  # Without heartbeats, and not shut down; the latest first.
    schedulers_expected: bool = True  # False: none is deployed, and gateways do their work.
    gateway_id: str = ""  # This gateway's.
    held: Mapping[str, Status] = field(default_factory=dict)  # Levels of outcomes and objectives, as HeldLevels.
    objectives: Mapping[str, TierObjective] = field(default_factory=dict)  # By tier.
    total_ms: int = 4000  # TIERLANE_TOTAL_REQUEST_MS
    ended_tasks: tuple[EndedTask, ...] = ()  # Restarted tasks of this process; the latest first.
    time: str = ""  # Now, RFC 3339.


def health(inputs: HealthInputs) -> MeasuredPool:
    """The state of one pool."""
    seen = inputs.observation
    workers, gateways = (seen.workers, seen.gateways) if seen else ([], [])
    results = tier_results(list(inputs.factors), inputs.objectives, seen)
    tiers = {name: measured_tier(name, part, seen, results[name]) for name, part in inputs.factors.items()}
    found = _findings(inputs, tiers, results)
    checks: dict[str, list[Check]] = {}
    for each in found:
        checks.setdefault(each.name, []).append(each.check(inputs.time))
    worst_first = sorted(found, key=lambda each: LEVELS.index(each.level), reverse=True)
    healthy = [worker for worker in workers if worker.healthy]
    slotted = [worker for worker in healthy if worker.slots]
    busy = _mean([worker.utilization for worker in healthy])
    return {
        "status": max((each.level for each in found), key=LEVELS.index),
        "reasons": list(dict.fromkeys(each.reason for each in worst_first if each.reason)),
        "gpu_utilization": round(min(1.0, max(0.0, busy)), 4),
        "padding_waste": round(_mean([worker.padding_waste for worker in healthy]), 4),
        "queue_depth": sum(tier.depth for tier in seen.tiers.values()) if seen else 0,
        "requests_per_second": total([gateway.requests_per_second for gateway in gateways]),
        "healthy_gpus": len(healthy),
        "total_gpus": len(workers),
        "unhealthy_gpus": dict(Counter(sorted(_cause(worker) for worker in workers if not worker.healthy))),
        "capacity_rps": round(inputs.capacity_rps, 3) if healthy else 0.0,
        "capacity_evidence": inputs.capacity_evidence,
        "capacity_confidence": round(inputs.capacity_confidence, 3),
        "slots": sum(worker.slots for worker in slotted),
        "running": sum(worker.in_flight for worker in slotted),
        "slots_source": shortened(sorted({each.slots_source for each in slotted if each.slots_source}), NAMED_WORKERS),
        "tiers": tiers,
        "dlq": seen.dlq if seen else 0,
        "audit_lag_ms": inputs.audit_lag_ms,
        "batches_per_second": total([gateway.batches_per_second for gateway in gateways]),
        "filled_per_second": total([gateway.filled_per_second for gateway in gateways]),
        "checks": checks,
    }


def _findings(
    inputs: HealthInputs, tiers: Mapping[str, MeasuredTier], results: Mapping[str, TierResult]
) -> list[HealthFinding]:
    seen = inputs.observation
    workers, gateways = (seen.workers, seen.gateways) if seen else ([], [])
    evidence = CauseInputs(workers, inputs.restarts_last_minute, inputs.total_ms, failing_customer(gateways))
    jobs, no_model = inputs.jobs_problem, "No model is enabled." if inputs.no_model else None
    if jobs is not None:
        jobs = f"Jobs and files cannot be stored and get 503: {_clause(jobs, '')}."
    findings = [  # Causes before their effects, since reasons of one level have this order.
        *_gpus(inputs),
        _redis(inputs),
        scheduling(seen, registering=inputs.registering, expected=inputs.schedulers_expected),
        failing_tiers(results, inputs.held, evidence),
        shedding(
            tiers,
            results,
            inputs.capacity_rps,
            inputs.losses,
            healthy_gpus=sum(worker.healthy for worker in workers),
            obstacle=_obstacle(inputs),
            gateways=gateways,
        ),
        _catalog(inputs),
        _connections(inputs),
        finding("jobs:stored", "datastore", "no" if jobs else "yes", "", jobs, "jobs_not_stored"),
        finding(
            "models:enabled", "component", "no" if no_model else "yes", "", no_model, "no_model_enabled", level="down"
        ),
        refused_customers(seen),
        *missed_objectives(results, inputs.held),
        restarted(inputs.restarts),
        lost_gateways(seen, inputs.lost_gateways),
        ended_tasks(inputs.ended_tasks, seen, inputs.gateway_id),
        *_replies_and_records(inputs),
        reduced_limits(inputs.factors),
        amplified_load(list(inputs.factors), seen),
        repaired_keys(seen),
        *_redis_state(inputs),
        paused_tiers(inputs.paused, seen),
    ]
    if inputs.tokens_problem:
        findings.append(problem("jwks_stale", "jwks:age", "component", "degraded", "old", "", inputs.tokens_problem))
    if inputs.direct is not None:
        findings += _direct(inputs.direct)
    if inputs.leaving:
        reason = f"This gateway is draining; open requests: {inputs.open_requests}."
        findings.append(problem("gateway_stopping", "gateway:leaving", "component", "degraded", "yes", "", reason))
    if _served_directly(inputs.direct):
        findings = [
            replace(f, level="degraded") if f.level == "down" and f.name in _QUEUE_CHECKS else f for f in findings
        ]
    return [with_impact(each) for each in findings]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _gpus(inputs: HealthInputs) -> list[HealthFinding]:
    """Whether all workers are healthy: a finding for each cause, with its action, the worst first."""
    seen = inputs.observation
    total = seen.total_gpus if seen else 0
    unhealthy = [worker for worker in seen.workers if not worker.healthy or is_slow(worker)] if seen else []
    name, kind, unit = "gpus:healthy", "component", "gpus"
    if inputs.registering and not unhealthy:  # Some may have registered already.
        reason = "Redis was restarted without its data; workers and schedulers are registering again."
        return [problem("workers_registering", name, kind, "degraded", total, unit, reason)]
    if total == 0 and inputs.gpus_elsewhere:
        return [HealthFinding(name, kind, "healthy", 0, unit)]
    if total == 0:
        return [problem("no_gpu", name, kind, "down", 0, unit, "No GPU is known: no worker has sent a heartbeat.")]
    silent = [worker for worker in seen.workers if worker.reason] if seen else []
    if not unhealthy and silent:
        about = shortened([worker.id for worker in silent], NAMED_WORKERS)
        return [problem("endpoint_silent", name, kind, "degraded", total, unit, f"{reported_reasons(silent)}.", about)]
    if not unhealthy:
        return [HealthFinding(name, kind, "healthy", total, unit)]
    # A pausing worker resumes before requests would be rejected for lack of GPUs.
    all_lost = len(unhealthy) == total and not any(worker.pausing for worker in unhealthy) and not inputs.registering
    level: Status = "down" if all_lost and not inputs.gpus_elsewhere else "degraded"
    by_code: dict[str, list[WorkerView]] = {}
    for worker in unhealthy:
        by_code.setdefault(_worker_code(worker), []).append(worker)
    findings: list[HealthFinding] = []
    for code in sorted(by_code, key=_WORKER_CODES.index):
        workers = by_code[code]
        verb = "is" if len(workers) == 1 else "are"
        reason = f"{len(workers)} of {total} GPUs {verb} not healthy: {worker_problems(workers, inputs.cordons)}."
        about = shortened([worker.id for worker in workers], NAMED_WORKERS)
        # Only the first is `down`: it says what customers see.
        each_level: Status = "degraded" if findings else level
        findings.append(problem(code, name, kind, each_level, total - len(unhealthy), unit, reason, about))
    return findings


def _worker_code(worker: WorkerView) -> str:
    if worker.gpu is not None and worker.gpu.fault:
        return "gpu_fault"
    if is_slow(worker):
        return "model_too_slow"
    if worker.pausing:
        return "worker_paused"
    if worker.cause and worker.status in {"down", "failed"}:  # Because of its endpoint.
        return "endpoint_unavailable"
    return _STATUS_CODES.get(worker.status, "gpu_lost")


def _cause(worker: WorkerView) -> str:
    """Why a worker is not healthy; the last heartbeat of a lost one has the status that it had then."""
    return worker.cause[:MOST_CAUSE] or ("lost" if worker.status in ACTIVE_STATUSES else worker.status)


def _redis(inputs: HealthInputs) -> HealthFinding:
    age_s, direct = inputs.look_age_s, inputs.direct
    fresh = inputs.redis_problem is None and age_s is not None and age_s <= STALE_OBSERVATION_S
    if direct is not None and _served_directly(direct):
        redis = "Redis is responding again, but is not used until it is stable" if fresh else "Redis is not responding"
        workers = "1 worker" if direct.workers == 1 else f"{direct.workers} workers"
        reason = f"{redis}; requests have been served by direct calls to {workers} for {direct.for_s:.1f} s."
        return problem("direct_mode", "redis:look_age", "datastore", "degraded", age_s, "s", reason)
    if fresh:
        return HealthFinding("redis:look_age", "datastore", "healthy", round(age_s or 0.0, 2), "s")
    if age_s is None:
        reason = f"Redis has not responded yet: {_clause(inputs.redis_problem, 'this gateway has just started')}."
    else:
        why = _clause(inputs.redis_problem, "no error was reported")
        reason = f"Redis is not responding: {why}; it last responded {age_s:.1f} s ago."
    # One failed read is not an outage; failures for two seconds are.
    if age_s is not None and age_s <= STALE_OBSERVATION_S:
        return problem("redis_not_responding", "redis:look_age", "datastore", "degraded", age_s, "s", reason)
    return problem("redis_unavailable", "redis:look_age", "datastore", "down", age_s, "s", reason)


def _served_directly(direct: DirectView | None) -> bool:
    return direct is not None and direct.active and direct.serves


def _obstacle(inputs: HealthInputs) -> Obstacle | None:
    """A cause that rejects requests regardless of the capacity."""
    direct, seen = inputs.direct, inputs.observation
    if direct is not None and direct.active and direct.spool_problem:
        return Obstacle("the gateway's spool accepts no more records while Redis is not available", "direct:spool")
    if inputs.short_of_memory:
        return Obstacle("Redis is short of memory and accepts no new requests", "redis:memory")
    if seen is not None and seen.workers and not any(worker.healthy for worker in seen.workers):
        return Obstacle("no GPU is healthy", "gpus:healthy")
    return None


def _direct(direct: DirectView) -> list[HealthFinding]:
    """Whether requests can be served without Redis: the spool, the workers' endpoints, and the circuit breakers."""
    # Without a writable spool there is no direct mode: requests are rejected while Redis is not available.
    spool = finding(
        "direct:spool", "datastore", direct.spool_bytes, "bytes", direct.spool_problem, "spool_not_writable"
    )
    # A worker that cannot be called now would not serve in an outage of Redis either.
    count = len(direct.unreachable)
    named = " ".join(f"{each.worker_id}: {each.why}" for each in direct.unreachable[:NAMED_WORKERS])
    cannot = (
        f"This gateway cannot call {count} of the workers directly, as it must while Redis is not available. {named}"
    )
    about = shortened([each.worker_id for each in direct.unreachable], NAMED_WORKERS)
    unreachable = cannot if count else None
    endpoints = finding("direct:endpoints", "component", count, "workers", unreachable, "worker_unreachable", about)
    findings = [spool, endpoints]
    # The checks of all open breakers of workers have one reason, which names them.
    open_workers = [each for each, state in direct.breakers.items() if each != "redis" and state != BreakerState.CLOSED]
    named = shortened(open_workers, NAMED_WORKERS)
    for name, state in direct.breakers.items():
        if state == BreakerState.CLOSED:
            findings.append(HealthFinding(f"breaker:{name}", "component", "healthy", state, ""))
            continue
        # An open breaker of Redis is explained by the check of Redis; a worker has no other check.
        reason = None if name == "redis" else f"Direct calls to {named} fail and will be retried soon."
        about = "Redis" if name == "redis" else named
        findings.append(problem("circuit_open", f"breaker:{name}", "component", "degraded", state, "", reason, about))
    return findings


def _catalog(inputs: HealthInputs) -> HealthFinding:
    name, fault, age_s = "catalog:age", inputs.catalog_problem, round(inputs.catalog_age_s, 1)
    if not inputs.catalog_loaded:
        reason = f"The catalog was never loaded: {_clause(fault, 'PostgreSQL has not responded yet')}."
        return problem("catalog_not_loaded", name, "datastore", "down", None, "s", reason)
    why = _clause(fault, "PostgreSQL is not responding")
    if inputs.catalog_left_s < 0:
        reason = f"{why}. The catalog was last confirmed {age_s} s ago; keys are no longer accepted."
        return problem("catalog_expired", name, "datastore", "down", age_s, "s", reason)
    if not fault and inputs.catalog_fresh:
        return HealthFinding(name, "datastore", "healthy", age_s, "s")
    code = "catalog_invalid" if inputs.bad_row else "catalog_stale"
    most = "" if inputs.bad_row else f" for at most {max(0.0, inputs.catalog_left_s):.0f} s more"
    reason = f"{why}. Requests are served{most} with the catalog confirmed {age_s} s ago; changes are not applied."
    return problem(code, name, "datastore", "degraded", age_s, "s", reason)


def _connections(inputs: HealthInputs) -> HealthFinding:
    """Whether PostgreSQL accepts new connections; while it does not respond at all, the check of the catalog reports that."""
    fault, is_away = inputs.connection_problem, inputs.catalog_problem is not None and not inputs.bad_row
    refused = None
    if fault is not None and inputs.catalog_loaded and not is_away:
        refused = f"{_clause(fault, '')}. Its open sessions work; a session that is lost cannot be replaced."
    accepts = "no" if refused else "yes"
    return finding("postgres:connections", "datastore", accepts, "", refused, "postgres_refuses_connections")


def _clause(fault: str | None, default: str) -> str:
    """A fault without its full stop, to end a longer sentence."""
    return (fault or default).rstrip(".")


def _replies_and_records(inputs: HealthInputs) -> list[HealthFinding]:
    """The subscription to responses, and the lag of the audit."""
    unsubscribed = "This gateway is not subscribed to its replies in Redis; responses are late, because it polls the stored results."
    reason = None if inputs.subscribed else unsubscribed
    subscribed = "yes" if inputs.subscribed else "no"
    responses = finding("responses:subscribed", "component", subscribed, "", reason, "responses_not_subscribed")
    lag_ms = inputs.audit_lag_ms
    unknown = f"The audit lag is not known: {_clause(inputs.audit_problem, 'Redis is not responding')}."
    late = unknown if lag_ms is None else None
    if lag_ms is not None and lag_ms > STALE_AUDIT_MS:
        late = f"The audit lag is {lag_ms / 1000:.1f} s: records wait in Redis for PostgreSQL."
    code = "audit_lag_unknown" if lag_ms is None else "audit_lag"
    return [responses, finding("audit:lag", "datastore", lag_ms, "ms", late, code)]


def _redis_state(inputs: HealthInputs) -> list[HealthFinding]:
    """The memory, the eviction policy and the distance of Redis."""
    share, policy, took_s = round(inputs.memory_share, 4), inputs.eviction_policy, inputs.round_trip_s
    full = (
        f"Redis uses {share:.0%} of its memory limit: new requests are rejected with 429 until it uses less than "
        f"{MEMORY_EASED:.0%}."
    )
    # Roles do not start with such a Redis, but the policy can be changed while they run.
    evicts = f"Redis has maxmemory-policy {policy}, which can evict queued requests."
    may_evict = policy not in ("", "noeviction")
    took_ms = None if took_s is None else round(1000 * took_s, 1)
    return [
        finding("redis:memory", "datastore", share, "ratio", full if inputs.short_of_memory else None, "redis_full"),
        finding("redis:eviction", "datastore", policy, "", evicts if may_evict else None, "redis_evicts"),
        finding("redis:round_trip", "datastore", took_ms, "ms", too_far(took_s), "redis_far"),
    ]
