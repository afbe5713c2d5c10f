"""The health checks: a pure function from the gateway's last observations to the document of `/internal/health`.

`down` means that requests cannot be served now, `degraded` that they are served although there is a problem. Every
reason is a sentence for the operator. The figures of a tier (limits, retries, rejections) cover all gateways.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.circuit_breaker import BreakerState
from gateway.direct.mode import DirectView
from gateway.limits.capacity import MEMORY_EASED
from gateway.operations.health_losses import (
    ACTIVE_STATUSES,
    Loss,
    LostGateway,
    Restart,
    ended_tasks,
    lost_gateways,
    repaired_keys,
    restarted,
    scheduling,
)
from gateway.operations.health_model import LEVELS, Health, HealthFigures, HealthFinding, Status, TierHealth
from ratelimit.capacity import CapacityEvidence
from scheduler.protocol.pool_view import Observation, TierDepth, TierStats, WorkerView
from scheduler.tasks import EndedTask

FULL_LIMITS = 0.995  # Percentages are rounded: limits must not be reported as reduced to 100 %.
AMPLIFIED = 1.5  # Retries are reported from this amplification on,
MIN_RETRIES_RPS = 10.0  # and from this rate on: at low rates, few retries are a high amplification.
MAX_AMPLIFICATION = 100.0  # If all observed requests are retries, the rate of first attempts is not known.


def tier_figures(name: str, part: float, seen: Observation | None) -> TierHealth:
    """The figures of one tier. `part`: the share of its base limits that is in force."""
    depth = (seen.tiers.get(name) if seen else None) or TierDepth(name, 0, 0.0)
    stats = _stats(name, seen)
    return {
        "depth": depth.depth,
        "oldest_ms": round(depth.oldest_ms, 1),
        "effective_limit_ratio": round(part, 4),
        # Each gateway reports the same value for the whole tier; a gateway that has just started reports 0.
        "allocated_rps": round(max((each.allocated_rps for each in stats), default=0.0), 3),
        "shed_per_second": round(sum(each.shed_per_second for each in stats), 3),
        "shadow_refusals_per_second": round(sum(each.shadowed_rps for each in stats), 3),
        "retry_amplification": round(_amplification(stats), 4),
        # The highest of all gateways: percentiles cannot be added.
        "p95_ms": max((each.p95_ms for each in stats), default=0.0),
    }


def reduced_limits(factors: Mapping[str, float]) -> HealthFinding:
    """Whether every tier has its base limits."""
    reduced = {name: part for name, part in factors.items() if part < FULL_LIMITS}
    if not reduced:
        return HealthFinding("limits:lowest", "component", "healthy", 1.0, "ratio")
    named = ", ".join(f"{name} to {part:.0%}" for name, part in reduced.items())
    lowest = round(min(reduced.values()), 4)
    return HealthFinding("limits:lowest", "component", "degraded", lowest, "ratio", f"Limits are reduced: {named}.")


def paused_tiers(names: Collection[str], seen: Observation | None) -> HealthFinding:
    """Whether an operator has paused tiers, and how many requests are queued in them."""
    if not names:
        return HealthFinding("tiers:paused", "component", "healthy", 0, "tiers")
    depths = {name: seen.tiers[name].depth for name in names if seen and name in seen.tiers}
    named = ", ".join(f"{name} ({depths[name]:,} queued)" if name in depths else name for name in sorted(names))
    reason = f"No batches are formed for paused tiers: {named}."
    return HealthFinding("tiers:paused", "component", "degraded", len(names), "tiers", reason)


def amplified_load(names: Sequence[str], seen: Observation | None) -> HealthFinding:
    """Whether retries of clients multiply the load of a tier."""
    stats = {name: _stats(name, seen) for name in names}
    highest = round(max((_amplification(each) for each in stats.values()), default=1.0), 4)
    named = [f"{name} by {_amplification(each):.1f}" for name, each in stats.items() if _is_amplified(each)]
    if not named:
        return HealthFinding("retries:amplification", "component", "healthy", highest, "ratio")
    reason = f"Client retries multiply the load: {', '.join(named)}."
    return HealthFinding("retries:amplification", "component", "degraded", highest, "ratio", reason)


def _stats(name: str, seen: Observation | None) -> list[TierStats]:
    gateways = seen.gateways if seen else []
    return [gateway.tiers[name] for gateway in gateways if name in gateway.tiers]


def _amplification(stats: Sequence[TierStats]) -> float:
    """All requests divided by first attempts; 1.0 without retries."""
    arrived, first = sum(each.arrived_rps for each in stats), sum(each.arrived_rps - each.retries_rps for each in stats)
    if arrived <= 0:
        return 1.0
    return max(1.0, arrived / max(first, arrived / MAX_AMPLIFICATION))


def _is_amplified(stats: Sequence[TierStats]) -> bool:
    retries_rps = sum(each.retries_rps for each in stats)
    return retries_rps >= MIN_RETRIES_RPS and _amplification(stats) > AMPLIFIED


MIN_SHED_SHARE = 0.02  # Of a tier's requests. Fewer rejections are normal at the threshold of a limit.
MIN_SHED_RPS = 0.5


class Flow(NamedTuple):
    """One tier over all gateways, requests/s."""

    arrived: float
    shed: float
    demand: float


def flows(names: Sequence[str], seen: Observation | None) -> dict[str, Flow]:
    """Arrivals and rejections for lack of capacity, by tier."""
    gateways = seen.gateways if seen else []
    found: dict[str, Flow] = {}
    for name in names:
        stats = [gateway.tiers[name] for gateway in gateways if name in gateway.tiers]
        found[name] = Flow(
            sum(each.arrived_rps for each in stats),
            sum(each.shed_per_second for each in stats),
            sum(each.demand_rps for each in stats),
        )
    return found


def shedding(
    tiers: Mapping[str, Flow], capacity_rps: float, losses: Sequence[Loss], obstacle: str | None = None
) -> HealthFinding:
    """Whether requests of a tier are rejected for lack of capacity, and why.

    `obstacle`: a cause that affects all requests; without it, the cause is the capacity or the queue length.
    """
    shed = {name: _share(flow) for name, flow in tiers.items() if _is_reported(flow)}
    worst = round(max(shed.values(), default=0.0), 4)
    if not shed:
        return HealthFinding("capacity:shed", "component", "healthy", worst, "ratio")
    shares = ", ".join(f"{share:.0%} of {name} requests" for name, share in shed.items())
    cause = obstacle or _cause(sum(flow.demand for flow in tiers.values()), capacity_rps)
    reason = f"Rejecting {shares}: {cause}{_since(losses)}."
    return HealthFinding("capacity:shed", "component", "degraded", worst, "ratio", reason)


def _is_reported(flow: Flow) -> bool:
    return flow.shed >= MIN_SHED_RPS and _share(flow) >= MIN_SHED_SHARE


def _share(flow: Flow) -> float:
    """0..1. A request may be rejected in a later heartbeat interval than the one it arrived in."""
    return min(1.0, flow.shed / max(flow.arrived, flow.shed)) if flow.shed > 0 else 0.0


def _cause(demand_rps: float, capacity_rps: float) -> str:
    if capacity_rps < demand_rps:
        return f"{demand_rps:.0f}/s demand exceeds {capacity_rps:.0f}/s capacity"
    return f"queues are too long, although {demand_rps:.0f}/s demand is within {capacity_rps:.0f}/s capacity"


def _since(losses: Sequence[Loss]) -> str:
    """The lost workers that were not replaced, and the time of the first loss, when the shortage began."""
    if not losses:
        return ""
    at = datetime.fromtimestamp(losses[-1].at_ms / 1000, tz=UTC)
    verb = "was" if len(losses) == 1 else "were"
    more = f" and {len(losses) - 1} more" if len(losses) > 1 else ""
    return f" since {losses[-1].worker}{more} {verb} lost at {at:%H:%M} UTC"


STALE_OBSERVATION_S = 2.0
STALE_AUDIT_MS = 10_000
NAMED_WORKERS = 5


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
    leaving: bool
    capacity_rps: float
    capacity_evidence: CapacityEvidence = CapacityEvidence.PRIOR
    capacity_confidence: float = 0.0
    memory_share: float = 0.0  # Of Redis' memory limit, 0..1.
    short_of_memory: bool = False  # New requests are rejected because of it.
    eviction_policy: str = ""  # Redis' maxmemory-policy, "" if it is not known.
    no_model: bool = False  # No model of the catalog is enabled.
    factors: Mapping[str, float] = field(default_factory=dict)  # Tier -> share of its limits in force, all tiers.
    paused: Collection[str] = ()  # Tiers for which no batches are formed.
    audit_lag_ms: int | None = 0  # None: it could not be read.
    direct: DirectView | None = None
    tokens_problem: str | None = None  # Why JWTs cannot be verified with current keys.
    losses: tuple[Loss, ...] = ()  # Lost workers, the latest first.
    restarts: tuple[Restart, ...] = ()  # Recently replaced model processes.
    lost_gateways: tuple[LostGateway, ...] = ()  # Without heartbeats, and not shut down; the latest first.
    gateway_id: str = ""  # This gateway's.
    ended_tasks: tuple[EndedTask, ...] = ()  # Restarted tasks of this process; the latest first.
    time: str = ""  # Now, RFC 3339.


_QUEUE_CHECKS = frozenset({"gpus:healthy", "redis:look_age", "scheduler:pass_age"})
"""Checks of the queue path: not an outage while direct mode serves requests."""


def health(inputs: HealthInputs) -> tuple[int, Health]:
    """The HTTP status and the document."""
    tiers = flows(list(inputs.factors), inputs.observation)
    findings = [shedding(tiers, inputs.capacity_rps, inputs.losses, _obstacle(inputs))]
    findings += [_gpus(inputs), _redis(inputs), _catalog(inputs), _models(inputs)]
    findings += [restarted(inputs.restarts), scheduling(inputs.observation)]
    findings += [lost_gateways(inputs.observation, inputs.lost_gateways)]
    findings += [ended_tasks(inputs.ended_tasks, inputs.observation, inputs.gateway_id)]
    findings += [_subscriber(inputs), _audit(inputs)]
    findings += [reduced_limits(inputs.factors), amplified_load(list(inputs.factors), inputs.observation)]
    findings += [
        repaired_keys(inputs.observation),
        _memory(inputs),
        _eviction(inputs),
        paused_tiers(inputs.paused, inputs.observation),
    ]
    if inputs.tokens_problem:
        findings.append(HealthFinding("jwks:age", "component", "degraded", "old", "", inputs.tokens_problem))
    if inputs.direct is not None:
        findings += [_spool(inputs.direct), _endpoints(inputs.direct), *_breakers(inputs.direct)]
    if inputs.leaving:
        findings.append(
            HealthFinding("gateway:leaving", "component", "degraded", "yes", "", "This gateway is shutting down.")
        )
    if _served_directly(inputs.direct):
        findings = [
            replace(f, level="degraded") if f.level == "down" and f.name in _QUEUE_CHECKS else f for f in findings
        ]
    status = max((finding.level for finding in findings), key=LEVELS.index)
    document: Health = {
        "status": status,
        "reasons": [finding.reason for finding in findings if finding.reason],
        **_figures(inputs),
        "checks": {finding.name: [finding.check(inputs.time)] for finding in findings},
    }
    return (503 if status == "down" else 200), document


def _figures(inputs: HealthInputs) -> HealthFigures:
    seen = inputs.observation
    workers = [worker for worker in seen.workers if worker.healthy] if seen else []
    gateways = seen.gateways if seen else []
    busy = _mean([worker.utilization for worker in workers])
    return {
        "gpu_utilization": round(min(1.0, max(0.0, busy)), 4),
        "padding_waste": round(_mean([worker.padding_waste for worker in workers]), 4),
        "queue_depth": sum(tier.depth for tier in seen.tiers.values()) if seen else 0,
        "requests_per_second": round(sum(gateway.requests_per_second for gateway in gateways), 3),
        "healthy_gpus": len(workers),
        "total_gpus": seen.total_gpus if seen else 0,
        "capacity_rps": round(inputs.capacity_rps, 3) if workers else 0.0,
        "capacity_evidence": inputs.capacity_evidence,
        "capacity_confidence": round(inputs.capacity_confidence, 3),
        "tiers": {name: tier_figures(name, part, seen) for name, part in inputs.factors.items()},
        "dlq": seen.dlq if seen else 0,
        "audit_lag_ms": inputs.audit_lag_ms,
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _gpus(inputs: HealthInputs) -> HealthFinding:
    seen = inputs.observation
    total = seen.total_gpus if seen else 0
    unhealthy = [worker for worker in seen.workers if not worker.healthy] if seen else []
    reason: str | None = None
    level: Status = "healthy"
    if total == 0:
        level, reason = "down", "No GPU is known: no worker has sent a heartbeat."
    elif unhealthy:
        # A pausing worker resumes before requests would be rejected for lack of GPUs.
        level = "down" if len(unhealthy) == total and not any(worker.pausing for worker in unhealthy) else "degraded"
        verb = "is" if len(unhealthy) == 1 else "are"
        named = "; ".join(_worker_problem(worker) for worker in unhealthy[:NAMED_WORKERS])
        more = f"; and {len(unhealthy) - NAMED_WORKERS} more" if len(unhealthy) > NAMED_WORKERS else ""
        reason = f"{len(unhealthy)} of {total} GPUs {verb} not healthy: {named}{more}."
    return HealthFinding("gpus:healthy", "component", level, total - len(unhealthy), "gpus", reason)


def _worker_problem(worker: WorkerView) -> str:
    if worker.pausing:
        return f"{worker.id} is briefly paused"
    if worker.status in ACTIVE_STATUSES:
        return f"{worker.id} was last seen {worker.age_ms / 1000:.1f} s ago"
    fault = f" ({worker.gpu.fault})" if worker.gpu is not None and worker.gpu.fault else ""
    return f"{worker.id} is {worker.status}{fault}, last seen {worker.age_ms / 1000:.1f} s ago"


def _redis(inputs: HealthInputs) -> HealthFinding:
    age_s, direct = inputs.look_age_s, inputs.direct
    fresh = inputs.redis_problem is None and age_s is not None and age_s <= STALE_OBSERVATION_S
    if direct is not None and _served_directly(direct):
        reason = _direct_mode_reason(direct, fresh=fresh)
        return HealthFinding("redis:look_age", "datastore", "degraded", age_s, "s", reason)
    if fresh:
        return HealthFinding("redis:look_age", "datastore", "healthy", round(age_s or 0.0, 2), "s")
    if age_s is None:
        reason = f"Redis has not responded yet: {_clause(inputs.redis_problem, 'this gateway has just started')}."
    else:
        problem = _clause(inputs.redis_problem, "no error was reported")
        reason = f"Redis last responded {age_s:.1f} s ago: {problem}."
    # One failed read is not an outage; failures for two seconds are.
    level: Status = "degraded" if age_s is not None and age_s <= STALE_OBSERVATION_S else "down"
    return HealthFinding("redis:look_age", "datastore", level, age_s, "s", reason)


def _served_directly(direct: DirectView | None) -> bool:
    return direct is not None and direct.active and direct.serves


def _obstacle(inputs: HealthInputs) -> str | None:
    """A cause that rejects requests regardless of the capacity, with the name of its check."""
    direct, seen = inputs.direct, inputs.observation
    if direct is not None and direct.active and direct.spool_problem:
        return "the gateway's spool accepts no more records while Redis is not available (see direct:spool)"
    if inputs.short_of_memory:
        return "Redis is short of memory and accepts no new requests (see redis:memory)"
    if seen is not None and seen.workers and not any(worker.healthy for worker in seen.workers):
        return "no GPU is healthy (see gpus:healthy)"
    return None


def _direct_mode_reason(direct: DirectView, *, fresh: bool) -> str:
    redis = "Redis is responding again, but is not used until it is stable" if fresh else "Redis is not responding"
    workers = "1 worker" if direct.workers == 1 else f"{direct.workers} workers"
    return f"{redis}; requests have been served by direct calls to {workers} for {direct.for_s:.1f} s."


def _spool(direct: DirectView) -> HealthFinding:
    """Without a writable spool there is no direct mode: requests are rejected while Redis is not available."""
    level: Status = "degraded" if direct.spool_problem else "healthy"
    return HealthFinding("direct:spool", "datastore", level, direct.spool_bytes, "bytes", direct.spool_problem)


def _endpoints(direct: DirectView) -> HealthFinding:
    """A worker that cannot be called now would not serve in an outage of Redis either."""
    unreachable = direct.unreachable
    if not unreachable:
        return HealthFinding("direct:endpoints", "component", "healthy", 0, "workers")
    named = " ".join(f"{each.worker_id}: {each.why}" for each in unreachable[:NAMED_WORKERS])
    reason = (
        f"This gateway cannot call {len(unreachable)} of the workers directly, as it must while Redis is not available. "
        f"{named} Set TIERLANE_DIRECT_ADVERTISE of the worker to an address that gateways can reach, open its port to "
        "them, or disable its endpoint with TIERLANE_DIRECT_HOST=off."
    )
    return HealthFinding("direct:endpoints", "component", "degraded", len(unreachable), "workers", reason)


def _breakers(direct: DirectView) -> list[HealthFinding]:
    """An open breaker of Redis is explained by the check of Redis; a worker has no other check."""
    findings: list[HealthFinding] = []
    for name, state in direct.breakers.items():
        closed = state == BreakerState.CLOSED
        reason = None if closed or name == "redis" else f"Direct calls to {name} fail and will be retried soon."
        level: Status = "healthy" if closed else "degraded"
        findings.append(HealthFinding(f"breaker:{name}", "component", level, state, "", reason))
    return findings


def _catalog(inputs: HealthInputs) -> HealthFinding:
    age_s = round(inputs.catalog_age_s, 1)
    problem = inputs.catalog_problem
    if not inputs.catalog_loaded:
        reason = f"The catalog was never loaded: {_clause(problem, 'PostgreSQL has not responded yet')}."
        return HealthFinding("catalog:age", "datastore", "down", None, "s", reason)
    if problem or not inputs.catalog_fresh:
        reason = (
            f"{_clause(problem, 'PostgreSQL is not responding')}. Serving continues with the catalog of {age_s} s ago; "
            "changes are not applied."
        )
        return HealthFinding("catalog:age", "datastore", "degraded", age_s, "s", reason)
    return HealthFinding("catalog:age", "datastore", "healthy", age_s, "s")


def _models(inputs: HealthInputs) -> HealthFinding:
    """Without an enabled model, no request can be served."""
    if not inputs.no_model:
        return HealthFinding("models:enabled", "component", "healthy", "yes", "")
    reason = (
        "No model is enabled, so every request gets 404 model_not_found: enable one with "
        "`tierlane model set NAME --enabled on`, or create one with `tierlane model create NAME`."
    )
    return HealthFinding("models:enabled", "component", "down", "no", "", reason)


def _clause(problem: str | None, default: str) -> str:
    """A problem without its full stop, to end a longer sentence."""
    return (problem or default).rstrip(".")


def _subscriber(inputs: HealthInputs) -> HealthFinding:
    if inputs.subscribed:
        return HealthFinding("responses:subscribed", "component", "healthy", "yes", "")
    reason = "This gateway is not subscribed to its replies in Redis; responses are late, because it polls the stored results."
    return HealthFinding("responses:subscribed", "component", "degraded", "no", "", reason)


def _audit(inputs: HealthInputs) -> HealthFinding:
    lag_ms = inputs.audit_lag_ms
    if lag_ms is not None and lag_ms <= STALE_AUDIT_MS:
        return HealthFinding("audit:lag", "datastore", "healthy", lag_ms, "ms")
    lag = "is not known" if lag_ms is None else f"is {lag_ms / 1000:.1f} s: records wait in Redis for PostgreSQL"
    return HealthFinding("audit:lag", "datastore", "degraded", lag_ms, "ms", f"The audit lag {lag}.")


def _memory(inputs: HealthInputs) -> HealthFinding:
    share = round(inputs.memory_share, 4)
    if not inputs.short_of_memory:
        return HealthFinding("redis:memory", "datastore", "healthy", share, "ratio")
    reason = (
        f"Redis uses {share:.0%} of its memory limit: new requests are rejected with 429 until it uses less than "
        f"{MEMORY_EASED:.0%}."
    )
    return HealthFinding("redis:memory", "datastore", "degraded", share, "ratio", reason)


def _eviction(inputs: HealthInputs) -> HealthFinding:
    """Roles do not start with such a Redis, but the policy can be changed while they run."""
    policy = inputs.eviction_policy
    if policy in ("", "noeviction"):
        return HealthFinding("redis:eviction", "datastore", "healthy", policy, "")
    reason = (
        f"Redis has maxmemory-policy {policy}, which can evict queued requests: run `CONFIG SET maxmemory-policy "
        "noeviction`, and set it in the server's configuration."
    )
    return HealthFinding("redis:eviction", "datastore", "degraded", policy, "", reason)
