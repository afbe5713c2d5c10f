"""The points of the dashboard's history: the part of a state that is kept, and how points of several times are merged."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec

from gateway.operations.dashboard.state import DashboardEvent, DashboardState, PoolState
from gateway.operations.figures import Highest, Last, Lowest, Mean, Worst, merged, view
from gateway.operations.health.model import LEVELS

MAX_POOLS = 8
"""Pools with a history of their own."""

COARSE_EVENTS = 10
"""Events of a merged point."""

RANK = ("loss", "redis", "status", "dead_letters", "restart", "cordon", "worker", "config", "gateway")
"""Kinds of events, the most important first; all others come after them."""


class ByName(NamedTuple):
    """The rule of a list of points: those of the last list, each merged with all of its name."""

    kind: Callable[..., Any]

    def __call__(self, several: Sequence[Sequence[Any]]) -> list[Any]:
        points = list(chain.from_iterable(several))
        return [merged(self.kind, [each for each in points if each.name == last.name]) for last in several[-1]]


class TierHistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """One tier; the fields are those of `TierState`."""

    name: Last[str]
    depth: Highest[int]
    oldest_ms: Highest[float]
    in_rps: Mean[float]
    out_rps: Mean[float]
    shed_rps: Mean[float]
    limit_ratio: Lowest[float]
    p50_ms: Highest[float | None]
    p95_ms: Highest[float | None]
    p99_ms: Highest[float | None]
    failed_rps: Mean[float] = 0.0  # Gateways of older versions do not write it.


class PoolHistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """One of several pools."""

    name: Last[str]
    demand_rps: Mean[float]
    capacity_rps: Mean[float]
    tiers: Annotated[list[TierHistoryPoint], ByName(TierHistoryPoint)]


def main_events(events: Sequence[DashboardEvent], most: int) -> list[DashboardEvent]:
    """The `most` events of the most important kinds, of one kind the newest, in their order."""
    if len(events) <= most:
        return list(events)
    rank = {kind: number for number, kind in enumerate(RANK)}
    numbered = sorted(enumerate(events), key=lambda each: (rank.get(each[1].kind, len(RANK)), -each[0]))
    return [event for _, event in sorted(numbered[:most], key=lambda each: each[0])]


def _merged_events(several: Sequence[Sequence[DashboardEvent]]) -> list[DashboardEvent]:
    return main_events(list(chain.from_iterable(several)), COARSE_EVENTS)


class HistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """The data of the charts at one time, and the events since the previous point. `pools` is empty if there is one only."""

    at_ms: Last[int]
    status: Annotated[str, Worst(LEVELS)]
    demand_rps: Mean[float]
    capacity_rps: Mean[float]
    tiers: Annotated[list[TierHistoryPoint], ByName(TierHistoryPoint)]
    events: Annotated[list[DashboardEvent], _merged_events]
    pools: Annotated[list[PoolHistoryPoint], ByName(PoolHistoryPoint)] = []

    def of_pool(self, pool: str) -> "HistoryPoint":
        """The point with the figures of one pool; with those of all pools if the history has none of it."""
        found = next((each for each in self.pools if each.name == pool), None)
        if found is None:
            return msgspec.structs.replace(self, pools=[])
        return HistoryPoint(self.at_ms, self.status, found.demand_rps, found.capacity_rps, found.tiers, self.events)


def history_point(state: DashboardState, events: list[DashboardEvent]) -> HistoryPoint:
    """The part of a state that the history keeps."""
    pools = [view(PoolHistoryPoint, pool, tiers=_tier_points(pool)) for pool in (state.pools or [])[:MAX_POOLS]]
    return view(HistoryPoint, state, tiers=_tier_points(state), events=events, pools=pools)


def _tier_points(pool: PoolState) -> list[TierHistoryPoint]:
    return [view(TierHistoryPoint, tier) for tier in pool.tiers]
