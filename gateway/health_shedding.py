"""Who is refused for want of capacity, how many of them, and since when: the first thing that on-call wants to know. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.finding import Finding
from gateway.losses import Loss
from scheduler.protocol.pool_view import Observation

WORTH_TELLING = 0.02  # Of a tier's requests: fewer are the edge of a limit that works, and no news.
WORTH_TELLING_RPS = 0.5


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
) -> Finding:
    """Whether any tier is refused for want of capacity, and the sentence that says why: what is `in_the_way` of all
    requests, where something is, else capacity or what waits.
    """
    shed = {name: _share(flow) for name, flow in tiers.items() if _is_worth_telling(flow)}
    worst = round(max(shed.values(), default=0.0), 4)
    if not shed:
        return Finding("capacity:shed", "component", "healthy", worst, "ratio")
    said = ", ".join(f"{name} is shed {share:.0%}" for name, share in shed.items())
    why = in_the_way or _why(sum(flow.demand for flow in tiers.values()), capacity_rps)
    reason = f"{said}: {why}{_since(losses)}."
    return Finding("capacity:shed", "component", "degraded", worst, "ratio", reason)


def _is_worth_telling(flow: Flow) -> bool:
    return flow.shed >= WORTH_TELLING_RPS and _share(flow) >= WORTH_TELLING


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
