"""Health of each tier, over all gateways: its figures, whether its limits are lowered, what retries add to its load."""

from collections.abc import Collection, Mapping, Sequence

from gateway.finding import Finding
from gateway.operations.health_model import TierHealth
from scheduler.protocol.pool_view import Observation, TierDepth, TierStats

NEARLY_WHOLE = 0.995  # What is told in whole percent must not be lowered to 100 %.
AMPLIFIED = 1.5  # From here on clients' retries are a load of their own,
WORTH_TELLING_RPS = 10.0  # if there are so many: of three requests one may well be a retry.
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


def lowered_limits(factors: Mapping[str, float]) -> Finding:
    """Whether every tier has its base limits."""
    lowered = {name: part for name, part in factors.items() if part < NEARLY_WHOLE}
    if not lowered:
        return Finding("limits:lowest", "component", "healthy", 1.0, "ratio")
    named = ", ".join(f"{name} to {part:.0%}" for name, part in lowered.items())
    lowest = round(min(lowered.values()), 4)
    return Finding("limits:lowest", "component", "degraded", lowest, "ratio", f"Limits are lowered: {named}.")


def paused_tiers(names: Collection[str], seen: Observation | None) -> Finding:
    """Whether somebody has paused a tier, and how many wait there."""
    if not names:
        return Finding("tiers:paused", "component", "healthy", 0, "tiers")
    depths = {name: seen.tiers[name].depth for name in names if seen and name in seen.tiers}
    named = ", ".join(f"{name} ({depths[name]:,} waiting)" if name in depths else name for name in sorted(names))
    return Finding(
        "tiers:paused", "component", "degraded", len(names), "tiers", f"No batches are formed of {named}: paused."
    )


def amplified_load(names: Sequence[str], seen: Observation | None) -> Finding:
    """Whether clients' retries multiply the load of a tier."""
    stats = {name: _stats(name, seen) for name in names}
    highest = round(max((_amplification(each) for each in stats.values()), default=1.0), 4)
    named = [f"{name} {_amplification(each):.1f}-fold" for name, each in stats.items() if _is_amplified(each)]
    if not named:
        return Finding("retries:amplification", "component", "healthy", highest, "ratio")
    reason = f"Clients' retries multiply the load: {', '.join(named)}."
    return Finding("retries:amplification", "component", "degraded", highest, "ratio", reason)


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
    return retries_rps >= WORTH_TELLING_RPS and _amplification(stats) > AMPLIFIED
