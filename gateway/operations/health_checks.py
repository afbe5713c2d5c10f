"""The judgement of health: a pure function from what this gateway last saw to the document of `/internal/health`.

`down` means that requests cannot be served now, `degraded` that they are but something is wrong; every reason is a
sentence for the person on call. Each tier is judged over all gateways: its figures, lowered limits, retries, and who is
rejected for want of capacity, how many and since when.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.circuit_breaker import BreakerState
from gateway.direct.mode import DirectView
from gateway.limits.capacity import MEMORY_EASED
from gateway.operations.health_losses import (
    SILENT,
    Loss,
    LostGateway,
    Restart,
    ended_tasks,
    other_gateways,
    repaired_keys,
    restarted,
    scheduling,
)
from gateway.operations.health_model import LEVELS, Health, HealthFigures, HealthFinding, Status, TierHealth
from ratelimit.capacity import CapacityEvidence
from scheduler.protocol.pool_view import Observation, TierDepth, TierStats, WorkerView
from scheduler.tasks import EndedTask

NEARLY_WHOLE = 0.995  # What is told in whole percent must not be lowered to 100 %.
AMPLIFIED = 1.5  # From here on clients' retries are a load of their own,
RETRIES_WORTH_TELLING_RPS = 10.0  # if there are so many: of three requests one may well be a retry.
MOST_AMPLIFIED = 100.0  # Where all were tried before, their first tries are not seen any more.


def tier_figures(name: str, part: float, seen: Observation | None) -> TierHealth:
    """What the document says of one tier, of whose base limits `part` is in force."""
    depth = (seen.tiers.get(name) if seen else None) or TierDepth(name, 0, 0.0)
    stats = _stats(name, seen)
    return {
        "depth": depth.depth,
        "oldest_ms": round(depth.oldest_ms, 1),
        "effective_limit_ratio": round(part, 4),
        # Each gateway says the same of the whole tier; one that has just begun says 0.
        "allocated_rps": round(max((each.allocated_rps for each in stats), default=0.0), 3),
        "shed_per_second": round(sum(each.shed_per_second for each in stats), 3),
        "shadow_refusals_per_second": round(sum(each.shadowed_rps for each in stats), 3),
        "retry_amplification": round(_amplification(stats), 4),
        # The slowest gateway's figure: percentiles cannot be added, and on-call wants the worst.
        "p95_ms": max((each.p95_ms for each in stats), default=0.0),
    }


def lowered_limits(factors: Mapping[str, float]) -> HealthFinding:
    """Whether every tier has its base limits."""
    lowered = {name: part for name, part in factors.items() if part < NEARLY_WHOLE}
    if not lowered:
        return HealthFinding("limits:lowest", "component", "healthy", 1.0, "ratio")
    named = ", ".join(f"{name} to {part:.0%}" for name, part in lowered.items())
    lowest = round(min(lowered.values()), 4)
    return HealthFinding("limits:lowest", "component", "degraded", lowest, "ratio", f"Limits are lowered: {named}.")


def paused_tiers(names: Collection[str], seen: Observation | None) -> HealthFinding:
    """Whether somebody has paused a tier, and how many wait there."""
    if not names:
        return HealthFinding("tiers:paused", "component", "healthy", 0, "tiers")
    depths = {name: seen.tiers[name].depth for name in names if seen and name in seen.tiers}
    named = ", ".join(f"{name} ({depths[name]:,} waiting)" if name in depths else name for name in sorted(names))
    return HealthFinding(
        "tiers:paused", "component", "degraded", len(names), "tiers", f"No batches are formed of {named}: paused."
    )


def amplified_load(names: Sequence[str], seen: Observation | None) -> HealthFinding:
    """Whether clients' retries multiply the load of a tier."""
    stats = {name: _stats(name, seen) for name in names}
    highest = round(max((_amplification(each) for each in stats.values()), default=1.0), 4)
    named = [f"{name} {_amplification(each):.1f}-fold" for name, each in stats.items() if _is_amplified(each)]
    if not named:
        return HealthFinding("retries:amplification", "component", "healthy", highest, "ratio")
    reason = f"Clients' retries multiply the load: {', '.join(named)}."
    return HealthFinding("retries:amplification", "component", "degraded", highest, "ratio", reason)


def _stats(name: str, seen: Observation | None) -> list[TierStats]:
    gateways = seen.gateways if seen else []
    return [gateway.tiers[name] for gateway in gateways if name in gateway.tiers]


def _amplification(stats: Sequence[TierStats]) -> float:
    """All requests for each one that was new, 1.0 where none was tried before."""
    arrived, first = sum(each.arrived_rps for each in stats), sum(each.arrived_rps - each.retries_rps for each in stats)
    if arrived <= 0:
        return 1.0
    return max(1.0, arrived / max(first, arrived / MOST_AMPLIFIED))


def _is_amplified(stats: Sequence[TierStats]) -> bool:
    retries_rps = sum(each.retries_rps for each in stats)
    return retries_rps >= RETRIES_WORTH_TELLING_RPS and _amplification(stats) > AMPLIFIED


WORTH_TELLING = 0.02  # Of a tier's requests: fewer are the edge of a limit that works, and no news.
SHED_WORTH_TELLING_RPS = 0.5


class Flow(NamedTuple):
    """One tier over all gateways, requests/s."""

    arrived: float
    shed: float
    demand: float


def flows(names: Sequence[str], seen: Observation | None) -> dict[str, Flow]:
    """What comes and what is refused, by tier."""
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
    tiers: Mapping[str, Flow], capacity_rps: float, losses: Sequence[Loss], in_the_way: str | None = None
) -> HealthFinding:
    """Whether any tier is refused for want of capacity, and the sentence that says why: what is `in_the_way` of all
    requests, where something is, else capacity or what waits.
    """
    shed = {name: _share(flow) for name, flow in tiers.items() if _is_worth_telling(flow)}
    worst = round(max(shed.values(), default=0.0), 4)
    if not shed:
        return HealthFinding("capacity:shed", "component", "healthy", worst, "ratio")
    said = ", ".join(f"{name} is shed {share:.0%}" for name, share in shed.items())
    why = in_the_way or _why(sum(flow.demand for flow in tiers.values()), capacity_rps)
    reason = f"{said}: {why}{_since(losses)}."
    return HealthFinding("capacity:shed", "component", "degraded", worst, "ratio", reason)


def _is_worth_telling(flow: Flow) -> bool:
    return flow.shed >= SHED_WORTH_TELLING_RPS and _share(flow) >= WORTH_TELLING


def _share(flow: Flow) -> float:
    """0..1; a request may be refused in a later beat than it came in."""
    return min(1.0, flow.shed / max(flow.arrived, flow.shed)) if flow.shed > 0 else 0.0


def _why(demand_rps: float, capacity_rps: float) -> str:
    if capacity_rps < demand_rps:
        return f"capacity {capacity_rps:.0f}/s under demand {demand_rps:.0f}/s"
    return f"demand {demand_rps:.0f}/s within capacity {capacity_rps:.0f}/s, but too many wait"


def _since(losses: Sequence[Loss]) -> str:
    """The losses that are not made up for, by the time of the first: that is when it began."""
    if not losses:
        return ""
    at = datetime.fromtimestamp(losses[-1].at_ms / 1000, tz=UTC)
    verb = "was" if len(losses) == 1 else "were"
    more = f" and {len(losses) - 1} more" if len(losses) > 1 else ""
    return f" since {losses[-1].worker}{more} {verb} lost at {at:%H:%M} UTC"


STALE_LOOK_S = 2.0
STALE_AUDIT_MS = 10_000
NAMED_WORKERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthInputs:
    """Everything that health is judged by."""

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
    short_of_memory: bool = False  # New requests are refused for it.
    eviction_policy: str = ""  # Redis' maxmemory-policy, "" where it is not known.
    no_model: bool = False  # No row of the catalog's models is enabled.
    factors: Mapping[str, float] = field(default_factory=dict)  # Tier -> part of its limits in force, all tiers.
    paused: Collection[str] = ()  # Tiers of which no batch is formed.
    audit_lag_ms: int | None = 0  # None: it could not be read.
    direct: DirectView | None = None
    tokens_problem: str | None = None  # Why JWTs cannot be checked as they should.
    losses: tuple[Loss, ...] = ()  # Workers that serve no more, the latest first.
    restarts: tuple[Restart, ...] = ()  # Model processes that were replaced just now.
    lost_gateways: tuple[LostGateway, ...] = ()  # That beat no more, and did not leave; the latest first.
    gateway_id: str = ""  # This gateway's.
    ended_tasks: tuple[EndedTask, ...] = ()  # Of this process, that were started again; the latest first.
    time: str = ""  # Now, RFC 3339.


_OF_QUEUES = frozenset({"gpus:healthy", "redis:look_age", "scheduler:pass_age"})
"""What the way by the queues stands on: while requests go past them and are served, none of it is an outage."""


def health(inputs: HealthInputs) -> tuple[int, Health]:
    """The HTTP status and the document."""
    tiers = flows(list(inputs.factors), inputs.observation)
    findings = [shedding(tiers, inputs.capacity_rps, inputs.losses, _in_the_way(inputs))]
    findings += [_gpus(inputs), _redis(inputs), _catalog(inputs), _models(inputs)]
    findings += [restarted(inputs.restarts), scheduling(inputs.observation)]
    findings += [other_gateways(inputs.observation, inputs.lost_gateways)]
    findings += [ended_tasks(inputs.ended_tasks, inputs.observation, inputs.gateway_id)]
    findings += [_subscriber(inputs), _audit(inputs)]
    findings += [lowered_limits(inputs.factors), amplified_load(list(inputs.factors), inputs.observation)]
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
    if _served_past_redis(inputs.direct):
        findings = [replace(f, level="degraded") if f.level == "down" and f.name in _OF_QUEUES else f for f in findings]
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
    ill = [worker for worker in seen.workers if not worker.healthy] if seen else []
    reason: str | None = None
    level: Status = "healthy"
    if total == 0:
        level, reason = "down", "No GPU is known: no worker has said that it lives."
    elif ill:
        # One that pauses is back before anybody would be refused for want of GPUs.
        level = "down" if len(ill) == total and not any(worker.pausing for worker in ill) else "degraded"
        verb = "is" if len(ill) == 1 else "are"
        named = "; ".join(_illness(worker) for worker in ill[:NAMED_WORKERS])
        more = f"; and {len(ill) - NAMED_WORKERS} more" if len(ill) > NAMED_WORKERS else ""
        reason = f"{len(ill)} of {total} GPUs {verb} not healthy: {named}{more}."
    return HealthFinding("gpus:healthy", "component", level, total - len(ill), "gpus", reason)


def _illness(worker: WorkerView) -> str:
    if worker.pausing:
        return f"{worker.id} pauses for a moment"
    if worker.status in SILENT:
        return f"{worker.id} was last seen {worker.age_ms / 1000:.1f} s ago"
    fault = f" ({worker.gpu.fault})" if worker.gpu is not None and worker.gpu.fault else ""
    return f"{worker.id} is {worker.status}{fault}, last seen {worker.age_ms / 1000:.1f} s ago"


def _redis(inputs: HealthInputs) -> HealthFinding:
    age_s, direct = inputs.look_age_s, inputs.direct
    fresh = inputs.redis_problem is None and age_s is not None and age_s <= STALE_LOOK_S
    if direct is not None and _served_past_redis(direct):
        return HealthFinding(
            "redis:look_age", "datastore", "degraded", age_s, "s", _served_directly(direct, fresh=fresh)
        )
    if fresh:
        return HealthFinding("redis:look_age", "datastore", "healthy", round(age_s or 0.0, 2), "s")
    since = "has not been looked at yet" if age_s is None else f"was last looked at {age_s:.1f} s ago"
    reason = f"Redis {since}: {_clause(inputs.redis_problem, 'this gateway has just begun')}."
    # A single missed look is no outage; two seconds of them are.
    level: Status = "degraded" if age_s is not None and age_s <= STALE_LOOK_S else "down"
    return HealthFinding("redis:look_age", "datastore", level, age_s, "s", reason)


def _served_past_redis(direct: DirectView | None) -> bool:
    return direct is not None and direct.active and direct.serves


def _in_the_way(inputs: HealthInputs) -> str | None:
    """What keeps requests out before capacity is even asked: each cause has its words, and its check what to do."""
    direct, seen = inputs.direct, inputs.observation
    if direct is not None and direct.active and direct.spool_problem:
        return "the gateway's spool takes no more while requests go past Redis (see direct:spool)"
    if inputs.short_of_memory:
        return "Redis is short of memory and is given no new requests (see redis:memory)"
    if seen is not None and seen.workers and not any(worker.healthy for worker in seen.workers):
        return "no GPU is healthy (see gpus:healthy)"
    return None


def _served_directly(direct: DirectView, *, fresh: bool) -> str:
    redis = "Redis answers again, and is watched before it is trusted" if fresh else "Redis does not answer"
    workers = "1 worker" if direct.workers == 1 else f"{direct.workers} workers"
    return f"{redis}; requests are served by direct calls to {workers} since {direct.for_s:.1f} s."


def _spool(direct: DirectView) -> HealthFinding:
    """A spool that cannot be written means no direct mode when Redis goes, and refusals while it is away."""
    level: Status = "degraded" if direct.spool_problem else "healthy"
    return HealthFinding("direct:spool", "datastore", level, direct.spool_bytes, "bytes", direct.spool_problem)


def _endpoints(direct: DirectView) -> HealthFinding:
    """A worker that cannot be called now will not serve in an outage of Redis either."""
    ill = direct.unreachable
    if not ill:
        return HealthFinding("direct:endpoints", "component", "healthy", 0, "workers")
    named = " ".join(f"{each.worker_id}: {each.why}" for each in ill[:NAMED_WORKERS])
    reason = (
        f"This gateway cannot call {len(ill)} of the workers directly, which it needs while Redis is away. {named} "
        "Set TIERLANE_DIRECT_ADVERTISE of the worker to an address that gateways reach, open its port to them, or switch "
        "its endpoint off with TIERLANE_DIRECT_HOST=off."
    )
    return HealthFinding("direct:endpoints", "component", "degraded", len(ill), "workers", reason)


def _breakers(direct: DirectView) -> list[HealthFinding]:
    """Why one is open is said by the check of what it guards; a worker has none, so its own breaker says it."""
    findings: list[HealthFinding] = []
    for name, state in direct.breakers.items():
        well = state == BreakerState.CLOSED
        reason = None if well or name == "redis" else f"Direct calls to {name} fail; they are tried again soon."
        findings.append(
            HealthFinding(f"breaker:{name}", "component", "healthy" if well else "degraded", state, "", reason)
        )
    return findings


def _catalog(inputs: HealthInputs) -> HealthFinding:
    age_s = round(inputs.catalog_age_s, 1)
    problem = inputs.catalog_problem
    if not inputs.catalog_loaded:
        reason = f"The catalog was never loaded: {_clause(problem, 'PostgreSQL has not answered yet')}."
        return HealthFinding("catalog:age", "datastore", "down", None, "s", reason)
    if problem or not inputs.catalog_fresh:
        reason = f"The catalog is {age_s} s old: {_clause(problem, 'PostgreSQL does not answer')}."
        return HealthFinding("catalog:age", "datastore", "degraded", age_s, "s", reason)
    return HealthFinding("catalog:age", "datastore", "healthy", age_s, "s")


def _models(inputs: HealthInputs) -> HealthFinding:
    """Without an enabled model there is nothing that a request could name."""
    if not inputs.no_model:
        return HealthFinding("models:enabled", "component", "healthy", "yes", "")
    reason = (
        "No model is enabled, so every request is answered 404 model_not_found: enable one with "
        "`tierlane model set NAME --enabled on`, or add its row with `tierlane model create NAME`."
    )
    return HealthFinding("models:enabled", "component", "down", "no", "", reason)


def _clause(problem: str | None, otherwise: str) -> str:
    """A problem without its full stop, to end a longer sentence."""
    return (problem or otherwise).rstrip(".")


def _subscriber(inputs: HealthInputs) -> HealthFinding:
    if inputs.subscribed:
        return HealthFinding("responses:subscribed", "component", "healthy", "yes", "")
    reason = "This gateway is not subscribed to its answers; they come late, by reading the stored results."
    return HealthFinding("responses:subscribed", "component", "degraded", "no", "", reason)


def _audit(inputs: HealthInputs) -> HealthFinding:
    lag_ms = inputs.audit_lag_ms
    if lag_ms is not None and lag_ms <= STALE_AUDIT_MS:
        return HealthFinding("audit:lag", "datastore", "healthy", lag_ms, "ms")
    why = "is not known" if lag_ms is None else f"is {lag_ms / 1000:.1f} s: entries wait in Redis for PostgreSQL"
    return HealthFinding("audit:lag", "datastore", "degraded", lag_ms, "ms", f"The audit's lag {why}.")


def _memory(inputs: HealthInputs) -> HealthFinding:
    share = round(inputs.memory_share, 4)
    if not inputs.short_of_memory:
        return HealthFinding("redis:memory", "datastore", "healthy", share, "ratio")
    reason = (
        f"Redis uses {share:.0%} of its memory limit: new requests are refused with 429 until it is under "
        f"{MEMORY_EASED:.0%}."
    )
    return HealthFinding("redis:memory", "datastore", "degraded", share, "ratio", reason)


def _eviction(inputs: HealthInputs) -> HealthFinding:
    """A role refuses to start on such a Redis; it can be changed while they run."""
    policy = inputs.eviction_policy
    if policy in ("", "noeviction"):
        return HealthFinding("redis:eviction", "datastore", "healthy", policy, "")
    reason = (
        f"Redis has maxmemory-policy {policy}, which can evict queued work: `CONFIG SET maxmemory-policy noeviction`, and set "
        "it in the server's configuration."
    )
    return HealthFinding("redis:eviction", "datastore", "degraded", policy, "", reason)
