"""The figures and checks of tiers: limits in force, pauses, retries, and rejections for lack of capacity.

All are pure functions of the observation of a pool. The figures cover all gateways.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.limits.gpu_time import TOP_WAITING, tier_gpu_time
from gateway.limits.outcomes import CAPACITY_REJECTIONS
from gateway.operations.figures import sum_counts, total
from gateway.operations.health.advice import finding
from gateway.operations.health.model import HealthFinding, shortened
from gateway.operations.health.outcomes import NAMED_WORKERS, TierResult
from gateway.operations.health.pool_state import TOP_CUSTOMERS, MeasuredTier, TopCustomer
from gateway.operations.health.worker_losses import LostWorker
from scheduler.protocol.pool_view import GatewayStats, Observation, TierDepth, TierOutcomes, TierStats

FULL_LIMITS = 0.995  # Percentages are rounded: limits must not be reported as reduced to 100 %.
AMPLIFIED = 1.5  # Retries are reported from this amplification on,
MIN_RETRIES_RPS = 10.0  # and from this rate on: at low rates, few retries are a high amplification.
MAX_AMPLIFICATION = 100.0  # If all observed requests are retries, the rate of first attempts is not known.

MIN_SHED_SHARE = 0.02  # Of a tier's requests. Fewer rejections are normal at the threshold of a limit.
MIN_SHED_RPS = 0.5
MIN_REJECTED = 10  # Rejections from which on a share is shown, of the seconds of the rates or of a minute.
MOST_OF_ONE = 0.5  # Of the rejected requests: from here on their customer is named.
RATES_S = 2.0  # As the rates of gateways are averaged (gateway/limits/demand.py).


def measured_tier(name: str, part: float, seen: Observation | None, result: TierResult) -> MeasuredTier:
    """The figures of one tier. `part`: the share of its base limits that is in force."""
    depth = (seen.tiers.get(name) if seen else None) or TierDepth(name, 0, 0.0)
    background = seen.background.get(name) if seen else None
    stats, gpu_time = _stats(name, seen), tier_gpu_time(name, seen.gateways if seen else ())
    top: list[TopCustomer] = [
        {"name": each.name, "gpu_ms": round(each.gpu_ms, 1)}
        for each in gpu_time.customers[:TOP_CUSTOMERS]
        if each.gpu_ms
    ]
    return {
        "depth": depth.depth,
        "oldest_ms": round(depth.oldest_ms, 1),
        "effective_limit_ratio": round(part, 4),
        # Each gateway reports the same value for the whole tier; a gateway that has just started reports 0.
        "allocated_rps": round(max((each.allocated_rps for each in stats), default=0.0), 3),
        "shed_per_second": total([each.shed_per_second for each in stats]),
        "shadow_refusals_per_second": total([each.shadowed_rps for each in stats]),
        "retry_amplification": round(_amplification(stats), 4),
        "p95_ms": result.p95_ms,
        "error_ratio_10s": round(result.error_ratio_10s, 4),
        "error_ratio_60s": round(result.error_ratio_60s, 4),
        "burn_rate_5m": None if result.burn_rate_5m is None else round(result.burn_rate_5m, 2),
        "burn_rate_1h": None if result.burn_rate_1h is None else round(result.burn_rate_1h, 2),
        "slo_ms": result.objective.ms,
        "slo_success": result.objective.success,
        "fairness": round(gpu_time.fairness, 4),
        "top_customers": top,
        "background_depth": background.depth if background else 0,
        "errors_60s": sum_counts([result.outcomes.codes_60s, result.outcomes.others_60s]),
        "in_rps": total([each.arrived_rps for each in stats]),
        "out_rps": total([each.answered_rps for each in stats]),
        "demand_rps": total([each.demand_rps for each in stats]),
        "failed_rps": total([each.failed_rps for each in stats]),
        # The highest of all gateways, as p95: percentiles cannot be added.
        "p50_ms": max((each.p50_ms for each in stats), default=0.0),
        "p99_ms": max((each.p99_ms for each in stats), default=0.0),
    }


def reduced_limits(factors: Mapping[str, float]) -> HealthFinding:
    """Whether every tier has its base limits."""
    reduced = {name: part for name, part in factors.items() if part < FULL_LIMITS}
    named = ", ".join(f"{name} to {part:.0%}" for name, part in reduced.items())
    lowest = round(min(reduced.values(), default=1.0), 4)
    reason = f"Limits are reduced: {named}." if reduced else None
    return finding("limits:lowest", "component", lowest, "ratio", reason, "limits_reduced")


def paused_tiers(names: Collection[str], seen: Observation | None) -> HealthFinding:
    """Whether an operator has paused tiers, and how many requests are queued in them."""
    depths = {name: seen.tiers[name].depth for name in names if seen and name in seen.tiers}
    named = ", ".join(f"{name} ({depths[name]:,} queued)" if name in depths else name for name in sorted(names))
    reason = f"No batches are formed for paused tiers: {named}." if names else None
    about = ", ".join(sorted(names))
    return finding("tiers:paused", "component", len(names), "tiers", reason, "tier_paused", about)


def amplified_load(names: Sequence[str], seen: Observation | None) -> HealthFinding:
    """Whether retries of clients multiply the load of a tier."""
    highest = 1.0
    named: list[str] = []
    for name in names:
        stats = _stats(name, seen)
        amplification, retries_rps = _amplification(stats), sum(each.retries_rps for each in stats)
        highest = max(highest, amplification)
        if retries_rps >= MIN_RETRIES_RPS and amplification > AMPLIFIED:
            named.append(f"{name} by {amplification:.1f}")
    reason = f"Client retries multiply the load: {', '.join(named)}." if named else None
    return finding("retries:amplification", "component", round(highest, 4), "ratio", reason, "client_retries")


def _stats(name: str, seen: Observation | None) -> list[TierStats]:
    gateways = seen.gateways if seen else []
    return [gateway.tiers[name] for gateway in gateways if name in gateway.tiers]


def _amplification(stats: Sequence[TierStats]) -> float:
    """All requests divided by first attempts; 1.0 without retries."""
    arrived, first = sum(each.arrived_rps for each in stats), sum(each.arrived_rps - each.retries_rps for each in stats)
    if arrived <= 0:
        return 1.0
    return max(1.0, arrived / max(first, arrived / MAX_AMPLIFICATION))


class Obstacle(NamedTuple):
    """A cause of rejections that is not the load, and the check that explains it."""

    cause: str
    check: str


def _rejected_share(tier: MeasuredTier, outcomes: TierOutcomes) -> float:
    """The share of a tier's requests that are rejected for lack of capacity; 0.0 if they are too few to tell.

    With few requests, those of the last minute count.
    """
    shed_rps = tier["shed_per_second"]
    if shed_rps * RATES_S >= MIN_REJECTED:
        # A request may be rejected in a later heartbeat interval than the one it arrived in.
        return shed_rps / max(tier["in_rps"], shed_rps)
    rejected = sum(outcomes.others_60s.get(code, 0) for code in CAPACITY_REJECTIONS)
    if shed_rps < MIN_SHED_RPS or rejected < MIN_REJECTED:
        return 0.0
    return rejected / (rejected + outcomes.completed_60s + outcomes.failed_60s)


class Sender(NamedTuple):
    """The customer that sends most of the rejected requests. `share`: its part of them."""

    name: str
    customer_id: str
    share: float

    @property
    def clause(self) -> str:
        return f"; {self.share:.0%} of the rejected requests are of customer {self.name} ({self.customer_id})"


def _most_rejected(results: Mapping[str, TierResult], gateways: Sequence[GatewayStats]) -> Sender | None:
    """The customer of at least half of the rejected and failed requests of these tiers in the last minute, if there is one.

    None if no other customer sends requests: then its share is no information.
    """
    customers = [each for tier in results for each in tier_gpu_time(tier, gateways).customers]
    if len({each.name for each in customers}) == 1:
        return None
    most = max(customers, key=lambda each: each.unmet, default=None)
    if most is None or not most.customer_id:
        return None
    whole = sum(each.unmet for each in customers)
    if any(len(gateway.gpu_times) >= TOP_WAITING for gateway in gateways):  # Of many customers, some are not published.
        outcomes = [each.outcomes for each in results.values()]
        rejected = sum(each.others_60s.get(code, 0) for each in outcomes for code in CAPACITY_REJECTIONS)
        whole = max(whole, rejected + sum(each.failed_60s for each in outcomes))
    return Sender(most.name, most.customer_id, most.unmet / whole) if most.unmet >= MOST_OF_ONE * whole else None


def shedding(
    tiers: Mapping[str, MeasuredTier],
    results: Mapping[str, TierResult],
    capacity_rps: float,
    losses: Sequence[LostWorker],
    *,
    healthy_gpus: int = 0,
    obstacle: Obstacle | None = None,
    gateways: Sequence[GatewayStats] = (),
) -> HealthFinding:
    """Whether requests of a tier are rejected for lack of capacity, and why.

    `obstacle`: a cause that affects all requests. Without it, the cause is a loss of workers, the capacity or the queue length.
    After a loss, a customer is named only if the demand exceeds the capacity of the `healthy_gpus` with the lost ones.
    """
    shares = {name: _rejected_share(tier, results[name].outcomes) for name, tier in tiers.items()}
    shed = {name: share for name, share in shares.items() if share >= MIN_SHED_SHARE}
    worst = round(max(shed.values(), default=0.0), 4)
    if not shed:
        return HealthFinding("capacity:shed", "component", "healthy", worst, "ratio")
    demand_rps = sum(tier["demand_rps"] for tier in tiers.values())
    figures = f"{demand_rps:.0f}/s demand, {capacity_rps:.0f}/s capacity"
    named, about = ", ".join(f"{share:.0%} of {name} requests" for name, share in shed.items()), ""
    sender = _most_rejected({name: results[name] for name in shed}, gateways)
    if obstacle is not None:
        code, cause, about = "rejected_by_fault", f"{obstacle.cause} (see {obstacle.check})", obstacle.check
    elif losses:  # Of the workers that were not replaced: with the first loss the shortage began.
        at = datetime.fromtimestamp(losses[-1].at_ms / 1000, tz=UTC)
        verb = "was" if len(losses) == 1 else "were"
        more = f" and {len(losses) - 1} more" if len(losses) > 1 else ""
        since = f"since {losses[-1].worker}{more} {verb} lost at {at:%H:%M} UTC"
        code, cause, about = "capacity_lost", f"{figures} {since}", shortened([e.worker for e in losses], NAMED_WORKERS)
        if demand_rps * healthy_gpus <= capacity_rps * (healthy_gpus + len(losses)):
            sender = None
    elif sender is not None:
        code, cause, about = "capacity_exceeded", figures, sender.name
    elif capacity_rps < demand_rps:
        code, about = "capacity_exceeded", "the top customers"
        cause = f"{demand_rps:.0f}/s demand exceeds {capacity_rps:.0f}/s capacity"
    else:
        within = f"{demand_rps:.0f}/s demand is within {capacity_rps:.0f}/s capacity"
        code, cause = "queues_too_long", f"queues are too long, although {within}"
    reason = f"Rejecting {named}: {cause}{sender.clause if sender is not None and obstacle is None else ''}."
    return finding("capacity:shed", "component", worst, "ratio", reason, code, about)
