"""Why a tier's factor is what it is, in words and figures: a pure function of what the pool shows."""

from collections.abc import Iterable, Sequence

import msgspec

from ledger.catalog.snapshot import Model, Tier
from ratelimit.capacity import CapacityEvidence
from scheduler.protocol.pool_view import Observation
from tierlane.explain.figures import count, listed, number, percent, rate

_ALIKE = 0.01  # Figures that differ by less than this part are told as the same.
_SLACK = 0.02  # Demand moves between two looks, and so does what a factor is compared with.
_SEEN = 0.05  # Requests/s under this are nobody's demand.


class TierPart(msgspec.Struct, frozen=True):
    """A tier's part of the capacity; rates in requests/s, demand over all gateways, the rest at one of them."""

    name: str
    priority: int
    guaranteed_share: float
    guaranteed_rps: float
    demand_rps: float
    allocated_rps: float
    factor: float
    shadow: bool = False


class GatewayPart(msgspec.Struct, frozen=True):
    """What one gateway says of a tier."""

    id: str
    factor: float
    allocated_rps: float
    capacity_rps: float


class PoolCapacity(msgspec.Struct, frozen=True):
    """What the pool can do. `rates` are the measured ones of healthy GPUs, requests/s; `prior_rps` counts until measured."""

    capacity_rps: float
    healthy_gpus: int
    total_gpus: int
    rates: tuple[float, ...]
    target_utilization: float | None = None  # Not known without the models' rows.
    prior_rps: float | None = None
    evidence: str = ""  # As the gateway says: fixed, measured, probing or prior.
    confidence: float = 0.0  # 0..1: how near to full the measured batches were.
    correction: float = 1.0  # Times the rates that the GPUs report.


def gateways_of(tier: str, observation: Observation) -> list[GatewayPart]:
    """What each gateway says of a tier, the one with the lowest factor first."""
    parts = [
        GatewayPart(gateway.gateway_id, stats.factor, stats.allocated_rps, gateway.capacity_rps)
        for gateway in observation.gateways
        if (stats := gateway.tiers.get(tier))
    ]
    return sorted(parts, key=lambda part: (part.factor, part.id))


def tier_parts(tiers: Sequence[Tier], observation: Observation, gateway: GatewayPart) -> list[TierPart]:
    """Every tier by priority, as `gateway` shares out. Without rows the order is the gateways', and shares are 0."""
    stats = next((each.tiers for each in observation.gateways if each.gateway_id == gateway.id), {})
    demand = _demand(observation)
    known = tiers or [_nameless(name, i) for i, name in enumerate(stats, start=1)]
    return [
        TierPart(
            name=tier.name,
            priority=tier.priority,
            guaranteed_share=tier.guaranteed_share,
            guaranteed_rps=round(tier.guaranteed_share * gateway.capacity_rps, 3),
            demand_rps=round(demand.get(tier.name, 0.0), 3),
            allocated_rps=stats[tier.name].allocated_rps if tier.name in stats else 0.0,
            factor=stats[tier.name].factor if tier.name in stats else 1.0,
            shadow=tier.shadow,
        )
        for tier in sorted(known, key=lambda tier: tier.priority)
    ]


def capacity_of(observation: Observation, models: Iterable[Model], pool: str, gateway: GatewayPart) -> PoolCapacity:
    """The pool's GPUs, and what a gateway makes of them. A pool's most careful model speaks for it, as at the gateway."""
    served = [model for model in models if model.enabled and model.pool == pool]
    healthy = [worker for worker in observation.workers if worker.healthy]
    said = next((each for each in observation.gateways if each.gateway_id == gateway.id), None)
    return PoolCapacity(
        capacity_rps=gateway.capacity_rps,
        healthy_gpus=len(healthy),
        total_gpus=observation.total_gpus,
        rates=tuple(sorted(worker.rps for worker in healthy if worker.rps > 0)),
        target_utilization=min((model.target_utilization for model in served), default=None),
        prior_rps=min((model.rps_per_gpu for model in served), default=None),
        evidence=said.capacity_evidence if said else "",
        confidence=said.capacity_confidence if said else 0.0,
        correction=said.capacity_correction if said else 1.0,
    )


def why(tier: str, parts: Sequence[TierPart], capacity: PoolCapacity) -> str:
    """One sentence: the tier's factor, the capacity, who comes first, what the tier asks for and gets."""
    part = next(part for part in parts if part.name == tier)
    gpus = f"{capacity.healthy_gpus} of {count(capacity.total_gpus, 'GPU')} {_are(capacity.healthy_gpus)} healthy"
    state = f"{tier} has {_of_base(part.factor)}: {gpus}, capacity {rate(capacity.capacity_rps)}"
    if capacity.healthy_gpus == 0:
        return f"{state} as last measured; until a GPU is back, requests are refused with no_capacity."
    if part.factor >= 1:
        total = sum(each.demand_rps for each in parts)
        return f"{state}; all tiers together ask for {rate(total)}."
    before = _before(part, parts)
    first = f"; {listed(before)} {'comes' if len(before) == 1 else 'come'} first" if before else ""
    asks = f"; {tier} asks for {rate(part.demand_rps)} and gets {rate(part.allocated_rps)}{_share(part)}"
    return f"{state}{first}{asks}{_on_the_way_back(part)}."


def capacity_words(capacity: PoolCapacity) -> str:
    """What the capacity is derived from, and how sure it is."""
    if not capacity.healthy_gpus:
        return "No GPU is healthy, so no rate is measured now."
    gpus, figure = count(capacity.healthy_gpus, "healthy GPU"), f"Capacity {rate(capacity.capacity_rps)}"
    target = capacity.target_utilization
    sold = "" if target is None else f"{percent(target)} (target_utilization) of "
    if capacity.evidence == CapacityEvidence.FIXED:
        return f"{figure} is fixed: {sold}{number(capacity.prior_rps or 0)}/s for each of {gpus} (rps_per_gpu_fixed)."
    if capacity.evidence == CapacityEvidence.PRIOR:
        return f"{figure} is a guess (rps_per_gpu): no batch was measured yet, so no request is rejected for it."
    if capacity.evidence == CapacityEvidence.PROBING:
        seen = f"batches of {percent(capacity.confidence)} of the full size on {gpus}"
        return f"{figure} is {sold}an estimate from {seen}; it rises while requests are rejected and none wait."
    measured = f", measured at {_range(capacity.rates)}" if capacity.rates else ""
    served = ""
    if capacity.correction < 1:
        served = f" Under backlog {percent(capacity.correction)} of that was served, which counts."
    return f"{figure} is {sold}what {gpus} do with full batches{measured}.{served}"


def apart(tier: str, gateways: Sequence[GatewayPart]) -> str | None:
    """A sentence where gateways disagree, else None. Each has its own look at the pool, a quarter of a second old."""
    if not gateways or gateways[-1].factor - gateways[0].factor < _ALIKE:
        return None
    low, high = percent(gateways[0].factor), percent(gateways[-1].factor)
    return f"Gateways differ: {tier} has {low} to {high}; the lowest is told here."


def _demand(observation: Observation) -> dict[str, float]:
    demand: dict[str, float] = {}
    for gateway in observation.gateways:
        for name, stats in gateway.tiers.items():
            demand[name] = demand.get(name, 0.0) + stats.demand_rps
    return demand


def _nameless(name: str, priority: int) -> Tier:
    return Tier(name, priority, 0.0, 0.0, 0.0, 0, None, 0, 0, None, None)


def _of_base(factor: float) -> str:
    return "its full base limits" if factor >= 1 else f"{percent(factor)} of its base limits"


def _are(how_many: int) -> str:
    return "is" if how_many == 1 else "are"


def _before(part: TierPart, parts: Sequence[TierPart]) -> list[str]:
    """Who is served before the last of this tier's demand: higher tiers whole, lower ones as far as guaranteed."""
    higher = [
        f"{each.name} {rate(min(each.allocated_rps, each.demand_rps))}"
        for each in parts
        if each.priority < part.priority and min(each.allocated_rps, each.demand_rps) >= _SEEN
    ]
    lower = [
        f"{rate(kept)} guaranteed to {each.name}"
        for each in parts
        if each.priority > part.priority and (kept := min(each.guaranteed_rps, each.demand_rps)) >= _SEEN
    ]
    return higher + lower


def _on_the_way_back(part: TierPart) -> str:
    """Limits tighten at once and relax slowly: then the factor is under what the figures of the moment would give."""
    deserved = min(1.0, part.allocated_rps / part.demand_rps) if part.demand_rps >= _SEEN else 1.0
    if part.factor >= deserved - _SLACK:
        return ""
    return (
        f", so its limits are on their way back to {percent(deserved)}; they rise slowly, so as not to jump to and fro"
    )


def _share(part: TierPart) -> str:
    if part.guaranteed_rps <= 0:
        return ""
    if abs(part.allocated_rps - part.guaranteed_rps) <= _ALIKE * part.guaranteed_rps:
        return " (its guaranteed share)"
    return f" ({rate(part.guaranteed_rps)} of it guaranteed)" if part.allocated_rps > part.guaranteed_rps else ""


def _range(rates: Sequence[float]) -> str:
    low, high = rates[0], rates[-1]
    return f"{rate(low)} each" if high - low <= _ALIKE * high else f"{rate(low)} to {rate(high)}"
