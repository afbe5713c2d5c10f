"""The factor of a tier and its cause, in sentences and figures: pure functions of an observation of the pool."""

from collections.abc import Iterable, Sequence

import msgspec

from ledger.catalog.snapshot import Model, Tier
from ratelimit.capacity import CapacityEvidence
from ratelimit.slot_capacity import ROOM
from scheduler.protocol.pool_view import Observation
from tierlane.explain.figures import count, listed, number, percent, rate

_ALIKE = 0.01  # Figures that differ by less are shown as equal.
_SLACK = 0.02  # Demand changes between two observations, and with it the factor to compare with.
_SEEN = 0.05  # Requests/s below it are not shown as demand.


class TierPart(msgspec.Struct, frozen=True):
    """A tier's part of the capacity; rates in requests/s, demand over all gateways, the rest at one of them.

    None without the rows of PostgreSQL: not known.
    """

    name: str
    priority: int | None
    guaranteed_share: float | None
    guaranteed_rps: float | None
    demand_rps: float
    allocated_rps: float
    factor: float
    shadow: bool = False


class GatewayPart(msgspec.Struct, frozen=True):
    """A tier at one gateway."""

    id: str
    factor: float
    allocated_rps: float
    capacity_rps: float


class PoolCapacity(msgspec.Struct, frozen=True):
    """The capacity of the pool. `rates` are measured, of healthy GPUs, requests/s; `prior_rps` applies until measured."""

    capacity_rps: float
    healthy_gpus: int
    total_gpus: int
    rates: tuple[float, ...]
    target_utilization: float | None = None  # None without the rows of the models.
    prior_rps: float | None = None
    evidence: str = ""  # As the gateway reports it: fixed, measured, probing or prior.
    confidence: float = 0.0  # 0..1: how close to full the measured batches were.
    correction: float = 1.0  # A factor on the rates that the GPUs report.
    slots: int = 0  # Requests that may run at a time; 0: the GPUs run batches.
    running: int = 0
    slots_source: str = ""


def gateways_of(tier: str, observation: Observation) -> list[GatewayPart]:
    """The tier at each gateway, lowest factor first."""
    parts = [
        GatewayPart(gateway.gateway_id, stats.factor, stats.allocated_rps, gateway.capacity_rps)
        for gateway in observation.gateways
        if (stats := gateway.tiers.get(tier))
    ]
    return sorted(parts, key=lambda part: (part.factor, part.id))


def tier_parts(tiers: Sequence[Tier], observation: Observation, gateway: GatewayPart) -> list[TierPart]:
    """Every tier by priority, as `gateway` allocates. Without rows the order is that of the gateways, which is the same."""
    stats = next((each.tiers for each in observation.gateways if each.gateway_id == gateway.id), {})
    demand: dict[str, float] = {}
    for each in observation.gateways:
        for name, figures in each.tiers.items():
            demand[name] = demand.get(name, 0.0) + figures.demand_rps
    rows = {tier.name: tier for tier in sorted(tiers, key=lambda tier: tier.priority)}
    return [
        TierPart(
            name=name,
            priority=row.priority if row else None,
            guaranteed_share=row.guaranteed_share if row else None,
            guaranteed_rps=round(row.guaranteed_share * gateway.capacity_rps, 3) if row else None,
            demand_rps=round(demand.get(name, 0.0), 3),
            allocated_rps=stats[name].allocated_rps if name in stats else 0.0,
            factor=stats[name].factor if name in stats else 1.0,
            shadow=row.shadow if row else False,
        )
        for name in rows or stats
        for row in [rows.get(name)]
    ]


def capacity_of(observation: Observation, models: Iterable[Model], pool: str, gateway: GatewayPart) -> PoolCapacity:
    """The pool's GPUs and the capacity at a gateway. With several models the lowest row applies, as at the gateway."""
    served = [model for model in models if model.enabled and model.pool == pool]
    healthy = [worker for worker in observation.workers if worker.healthy]
    source = next((each for each in observation.gateways if each.gateway_id == gateway.id), None)
    return PoolCapacity(
        capacity_rps=gateway.capacity_rps,
        healthy_gpus=len(healthy),
        total_gpus=observation.total_gpus,
        rates=tuple(sorted(worker.rps for worker in healthy if worker.rps > 0)),
        target_utilization=min((model.target_utilization for model in served), default=None),
        prior_rps=min((model.rps_per_gpu for model in served), default=None),
        evidence=source.capacity_evidence if source else "",
        confidence=source.capacity_confidence if source else 0.0,
        correction=source.capacity_correction if source else 1.0,
        slots=sum(worker.slots for worker in healthy),
        running=sum(worker.in_flight for worker in healthy if worker.slots),
        slots_source=", ".join(sorted({worker.slots_source for worker in healthy if worker.slots_source})),
    )


def why(tier: str, parts: Sequence[TierPart], capacity: PoolCapacity) -> str:
    """One sentence: the tier's factor, the capacity, the tiers served first, the tier's demand and what it gets."""
    part = next(part for part in parts if part.name == tier)
    gpus = f"{capacity.healthy_gpus} of {count(capacity.total_gpus, 'GPU')} {_are(capacity.healthy_gpus)} healthy"
    limits = "its full base limits" if part.factor >= 1 else f"{percent(part.factor)} of its base limits"
    state = f"{tier} has {limits}: {gpus}, capacity {rate(capacity.capacity_rps)}"
    if capacity.healthy_gpus == 0:
        return f"{state} as last measured; until a GPU is back, requests are rejected with no_capacity."
    if part.factor >= 1:
        total = sum(each.demand_rps for each in parts)
        return f"{state}; the demand of all tiers is {rate(total)}."
    # Higher tiers are served before the last of this tier's demand, and of lower ones what is guaranteed.
    rank = {each.name: place if each.priority is None else each.priority for place, each in enumerate(parts)}
    guaranteed_rps = part.guaranteed_rps or 0.0
    higher = [
        f"{each.name} {rate(min(each.allocated_rps, each.demand_rps))}"
        for each in parts
        if rank[each.name] < rank[tier] and min(each.allocated_rps, each.demand_rps) >= _SEEN
    ]
    lower = [
        f"{rate(kept)} guaranteed to {each.name}"
        for each in parts
        if rank[each.name] > rank[tier] and (kept := min(each.guaranteed_rps or 0.0, each.demand_rps)) >= _SEEN
    ]
    before = higher + lower
    first = f"; {listed(before)} {'is' if len(before) == 1 else 'are'} served first" if before else ""
    share = ""
    if guaranteed_rps > 0 and abs(part.allocated_rps - guaranteed_rps) <= _ALIKE * guaranteed_rps:
        share = " (its guaranteed share)"
    elif 0 < guaranteed_rps < part.allocated_rps:
        share = f" ({rate(guaranteed_rps)} of it guaranteed)"
    demand = f"; the demand of {tier} is {rate(part.demand_rps)}, and it gets {rate(part.allocated_rps)}{share}"
    # Limits tighten at once and relax slowly, so the factor may be below what the present figures give.
    deserved = min(1.0, part.allocated_rps / part.demand_rps) if part.demand_rps >= _SEEN else 1.0
    rising = ""
    if part.factor < deserved - _SLACK:
        rising = f"; its limits are rising to {percent(deserved)}, slowly, so that they do not oscillate"
    return f"{state}{first}{demand}{rising}."


def capacity_words(capacity: PoolCapacity) -> str:
    """The evidence for the capacity."""
    if not capacity.healthy_gpus:
        return "No GPU is healthy, so no rate is measured now."
    gpus, figure = count(capacity.healthy_gpus, "healthy GPU"), f"Capacity {rate(capacity.capacity_rps)}"
    target = capacity.target_utilization
    sold = "" if target is None else f"{percent(target)} (target_utilization) of "
    if capacity.evidence == CapacityEvidence.FIXED:
        each = "an unknown rate" if capacity.prior_rps is None else f"{number(capacity.prior_rps)}/s"
        return f"{figure} is fixed: {sold}{each} for each of {gpus} (rps_per_gpu_fixed)."
    if capacity.slots and capacity.evidence != CapacityEvidence.PRIOR:
        source = f" ({capacity.slots_source})" if capacity.slots_source else ""
        room = ", so no request is rejected for it" if capacity.running < ROOM * capacity.slots else ""
        running = f"{count(capacity.running, 'request')} {_are(capacity.running)} running{room}"
        slots = f"{count(capacity.slots, 'slot')}{source} of {gpus}"
        return f"{figure} is {slots} divided by the mean time of a request; {running}."
    if capacity.evidence == CapacityEvidence.PRIOR:
        return f"{figure} is a guess (rps_per_gpu): no batch was measured yet, so no request is rejected for it."
    if capacity.evidence == CapacityEvidence.PROBING:
        seen = f"batches of {percent(capacity.confidence)} of the full size on {gpus}"
        return f"{figure} is {sold}an estimate from {seen}; it rises while requests are rejected and none wait."
    measured = served = ""
    if capacity.rates:
        low, high = capacity.rates[0], capacity.rates[-1]
        alike = high - low <= _ALIKE * high
        measured = f", measured at {rate(low)} {'each' if alike else f'to {rate(high)}'}"
    if capacity.correction < 1:
        served = f" Only {percent(capacity.correction)} of that was served under backlog, so that is the capacity."
    return f"{figure} is {sold}what {gpus} can do with full batches{measured}.{served}"


def apart(tier: str, gateways: Sequence[GatewayPart]) -> str | None:
    """A sentence where gateways differ, else None. Each has its own observation, up to a quarter of a second old."""
    if not gateways or gateways[-1].factor - gateways[0].factor < _ALIKE:
        return None
    low, high = percent(gateways[0].factor), percent(gateways[-1].factor)
    return f"Gateways differ: {tier} has {low} to {high}; the lowest is shown here."


def _are(how_many: int) -> str:
    return "is" if how_many == 1 else "are"
