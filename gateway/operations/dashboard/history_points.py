"""The points of the dashboard's history: the part of a state that is kept."""

from collections.abc import Sequence

import msgspec

from gateway.operations.dashboard.state import DashboardEvent, DashboardState, TierState

MAX_POOLS = 8
"""Pools with a history of their own."""


class TierHistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """One tier; the fields are those of `TierState`."""

    name: str
    depth: int
    oldest_ms: float
    in_rps: float
    out_rps: float
    shed_rps: float
    limit_ratio: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    failed_rps: float = 0.0  # Gateways of older versions do not write it.


class PoolHistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """One of several pools."""

    name: str
    demand_rps: float
    capacity_rps: float
    tiers: list[TierHistoryPoint]


class HistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """The data of the charts at one time, and the events since the previous point. `pools` is empty if there is one only."""

    at_ms: int
    status: str
    demand_rps: float
    capacity_rps: float
    tiers: list[TierHistoryPoint]
    events: list[DashboardEvent]
    pools: list[PoolHistoryPoint] = []

    def of_pool(self, pool: str) -> "HistoryPoint":
        """The point with the figures of one pool; with those of all pools if the history has none of it."""
        found = next((each for each in self.pools if each.name == pool), None)
        if found is None:
            return msgspec.structs.replace(self, pools=[])
        return HistoryPoint(self.at_ms, self.status, found.demand_rps, found.capacity_rps, found.tiers, self.events)


def history_point(state: DashboardState, events: list[DashboardEvent]) -> HistoryPoint:
    """The part of a state that the history keeps."""
    pools = [
        PoolHistoryPoint(each.name, each.demand_rps, each.capacity_rps, _tier_points(each.tiers))
        for each in (state.pools or [])[:MAX_POOLS]
    ]
    tiers = _tier_points(state.tiers)
    return HistoryPoint(state.at_ms, state.status, state.demand_rps, state.capacity_rps, tiers, events, pools)


def _tier_points(tiers: Sequence[TierState]) -> list[TierHistoryPoint]:
    return [
        TierHistoryPoint(
            tier.name,
            tier.depth,
            tier.oldest_ms,
            tier.in_rps,
            tier.out_rps,
            tier.shed_rps,
            tier.limit_ratio,
            tier.p50_ms,
            tier.p95_ms,
            tier.p99_ms,
            tier.failed_rps,
        )
        for tier in tiers
    ]
