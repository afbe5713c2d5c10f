"""The state of a pool, or of several together, and the documents of `GET /internal/health` made from it.

Each figure is declared once, with the rule by which it is merged over pools and cells.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Annotated, TypedDict

from gateway.operations.figures import (
    First,
    Highest,
    Lowest,
    Total,
    Value,
    WeightedMean,
    Worst,
    highest,
    merged,
    sum_counts,
    view,
)
from gateway.operations.health.model import LEVELS, Check, Status
from ratelimit.capacity import CapacityEvidence
from scheduler.redis_client.keys import DEFAULT_CELL

TOP_CUSTOMERS = 5
PerGpu = Annotated[Value, WeightedMean("healthy_gpus")]


class TopCustomer(TypedDict):
    """GPU time of a customer in the last minute."""

    name: str
    gpu_ms: float


def _top_customers(several: Sequence[Sequence[TopCustomer]]) -> list[TopCustomer]:
    total: dict[str, float] = {}
    for each in chain.from_iterable(several):
        total[each["name"]] = total.get(each["name"], 0.0) + each["gpu_ms"]
    ordered = sorted(total.items(), key=lambda each: (-each[1], each[0]))
    return [{"name": name, "gpu_ms": round(gpu_ms, 1)} for name, gpu_ms in ordered[:TOP_CUSTOMERS]]


class TierHealth(TypedDict):
    """One tier over all gateways. Times in milliseconds, rates per second.

    `error_ratio_*`: the share (0..1) of ended requests that ended in an error of the service or in a timeout; rejections for
    lack of capacity do not count. `burn_rate_*`: how many times faster than `slo_success` allows requests fail, rejections
    for lack of capacity included; null without this objective. `fairness`: Jain's index (0..1) of GPU time per weight, of the
    customers that could have used more in the last minute. `background_depth`: queued jobs. `errors_60s`: all errors by code,
    those of clients and rejections included.
    """

    depth: Total[int]
    oldest_ms: Highest[float]
    effective_limit_ratio: Lowest[float]
    allocated_rps: Total[float]
    shed_per_second: Total[float]
    shadow_refusals_per_second: Total[float]
    retry_amplification: Highest[float]
    p95_ms: Highest[float]
    error_ratio_10s: Highest[float]
    error_ratio_60s: Highest[float]
    burn_rate_5m: Highest[float | None]
    burn_rate_1h: Highest[float | None]
    slo_ms: First[int | None]
    slo_success: First[float | None]
    fairness: Lowest[float]
    top_customers: Annotated[list[TopCustomer], _top_customers]
    background_depth: Total[int]
    errors_60s: Annotated[dict[str, int], sum_counts]


class MeasuredTier(TierHealth):
    """All figures of a tier: those of health, and those that only the dashboard shows. Percentiles are 0 if unknown.

    `in_rps`: offered requests; `out_rps`: responses; `demand_rps` and `failed_rps` as in TierStats.
    """

    in_rps: Total[float]
    out_rps: Total[float]
    demand_rps: Total[float]
    failed_rps: Total[float]
    p50_ms: Highest[float]
    p99_ms: Highest[float]


def _tiers(several: Sequence[Mapping[str, MeasuredTier]]) -> dict[str, MeasuredTier]:
    # Pools were measured one after the other: a tier that was added or removed meanwhile is not in all.
    names = dict.fromkeys(chain.from_iterable(several))
    return {name: merged(MeasuredTier, [each[name] for each in several if name in each]) for name in names}


def _joined(several: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(each for each in several if each))


def _highest_if_known(several: Sequence[int | None]) -> int | None:
    return None if None in several else highest(several)


class ServingFigures(TypedDict):
    """Figures of the workers and of the queues."""

    gpu_utilization: PerGpu[float]
    padding_waste: PerGpu[float]
    queue_depth: Total[int]
    requests_per_second: Total[float]
    healthy_gpus: Total[int]
    total_gpus: Total[int]
    unhealthy_gpus: Annotated[dict[str, int], sum_counts]
    capacity_rps: Total[float]
    capacity_evidence: Annotated[CapacityEvidence, Worst(tuple(CapacityEvidence))]
    capacity_confidence: Lowest[float]
    slots: Total[int]
    running: Total[int]
    slots_source: Annotated[str, _joined]


class TiersOfHealth(TypedDict):
    """The tiers by name."""

    tiers: dict[str, TierHealth]


class StorageFigures(TypedDict):
    """Figures of what is stored."""

    dlq: Total[int]
    audit_lag_ms: Annotated[int | None, _highest_if_known]


class MeasuredPool(ServingFigures, StorageFigures):
    """The state of a pool, or of several, of which health, the dashboard and its history are views. Batches as in GatewayStats."""

    status: Annotated[Status, Worst(LEVELS)]
    reasons: list[str]
    checks: dict[str, list[Check]]
    tiers: Annotated[dict[str, MeasuredTier], _tiers]
    batches_per_second: Total[float]
    filled_per_second: Total[float]


class HealthFigures(ServingFigures, TiersOfHealth, StorageFigures):
    """Figures. `gpu_utilization` and `padding_waste` are 0..1; `audit_lag_ms` is null if it cannot be read.

    `capacity_evidence`: the source of the capacity. `capacity_confidence` (0..1): how full the measured batches were, or which
    part of the slots is in use. `slots`: requests that run at a time in workers with slots, 0 without; `running`: those that
    run; `slots_source`: the evidence for the slots. `unhealthy_gpus`: their number by cause: the one that the worker reports, else
    its status, or `lost`.
    """


class PoolHealth(HealthFigures):
    """One pool of several."""

    status: Status


class Health(HealthFigures):
    """Status, one sentence for each problem, figures, and the checks of the health+json draft by name. `installation`: its name,
    "" if it has none.
    """

    status: Status
    installation: str
    reasons: list[str]
    checks: dict[str, list[Check]]


class HealthNow(Health):
    """The response of `GET /internal/health`. `age_s`: seconds since the checks ran."""

    age_s: float


class CellHealth(TypedDict):
    """One cell, over all pools. `state`: open, or draining."""

    status: Status
    state: str
    healthy_gpus: int
    queue_depth: int
    requests_per_second: float
    capacity_rps: float
    audit_lag_ms: int | None


class HealthOfPools(Health):
    """With several pools or cells, the figures are those of all together; `pools` has those of each, by `<pool>@<cell>` in cells
    other than the default one. `cells` is empty if there is one.
    """

    pools: dict[str, PoolHealth]
    cells: dict[str, CellHealth]


def merge_pools(pools: Mapping[str, MeasuredPool]) -> MeasuredPool:
    """The state of all pools together; the gateway's own pool is first.

    `down` only if no pool can serve: the gateway must not be taken out of service while one pool can.
    """
    states = list(pools.values())
    if len(states) == 1:
        return states[0]
    # Each reason appears once: first those that all pools share, then those of some pools, after their names.
    named: dict[str, list[str]] = {}
    for pool, state in pools.items():
        for reason in state["reasons"]:
            named.setdefault(reason, []).append(pool)
    reasons = [reason for reason, where in named.items() if len(where) == len(pools)]
    reasons += [
        f"Pool{'s' * (len(where) > 1)} {', '.join(where)}: {reason}"
        for reason, where in named.items()
        if len(where) < len(pools)
    ]
    own = next(iter(pools))
    checks = dict(pools[own]["checks"])
    for pool, state in pools.items():
        if pool != own:
            checks |= {f"{pool}/{name}": check for name, check in state["checks"].items()}
    whole = merged(MeasuredPool, states, reasons=reasons, checks=checks)
    if any(state["status"] != "down" for state in states) and whole["status"] == "down":
        whole["status"] = "degraded"
    return whole


def health_document(
    whole: MeasuredPool,
    pools: Mapping[str, MeasuredPool],
    draining: Collection[str] = frozenset(),
    installation: str = "",
) -> Health:
    """The document of `/internal/health`. `whole`: the state of all pools together; `draining`: cells in that state."""
    document: Health = {
        "status": whole["status"],
        "installation": installation,
        "reasons": whole["reasons"],
        **_figures(whole),
        "checks": whole["checks"],
    }
    if len(pools) == 1:
        return document
    cells: dict[str, list[MeasuredPool]] = {}
    if any("@" in place for place in pools):
        for place, state in pools.items():
            cells.setdefault(place.partition("@")[2] or DEFAULT_CELL, []).append(state)
    several: HealthOfPools = {
        **document,
        "pools": {pool: {"status": state["status"], **_figures(state)} for pool, state in pools.items()},
        "cells": {
            cell: view(CellHealth, merged(MeasuredPool, states), state="draining" if cell in draining else "open")
            for cell, states in cells.items()
        },
    }
    return several


def _figures(state: MeasuredPool) -> HealthFigures:
    return view(HealthFigures, state, tiers={name: view(TierHealth, tier) for name, tier in state["tiers"].items()})
