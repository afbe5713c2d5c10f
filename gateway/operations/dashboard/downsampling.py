"""Downsampling of the history: one point every two seconds for the last five minutes, before that one every 20 seconds."""

from collections.abc import Sequence

from gateway.operations.dashboard.history_points import HistoryPoint, PoolHistoryPoint, TierHistoryPoint
from gateway.operations.health.model import LEVELS
from scheduler.protocol.history import KEEP_MS

FINE_MS = 5 * 60_000
"""The age up to which every point is kept."""

COARSE_MS = 20_000
"""The time between older points."""

COARSE_EVENTS = 10
"""Events of one older point; the oldest are dropped."""


def _merged(points: Sequence[HistoryPoint]) -> HistoryPoint:
    """One point for several, at the time of the last: mean rates, and the worst of depth, limit and response times."""
    last = points[-1]
    if len(points) == 1 and len(last.events) <= COARSE_EVENTS:  # Most are merged already.
        return last
    pools = [
        PoolHistoryPoint(pool.name, *_mean_load(same), _merged_tiers([each.tiers for each in same]))
        for pool in last.pools
        if (same := [each for point in points for each in point.pools if each.name == pool.name])
    ]
    return HistoryPoint(
        last.at_ms,
        max((each.status for each in points), key=lambda status: LEVELS.index(status) if status in LEVELS else 0),
        *_mean_load(points),
        _merged_tiers([each.tiers for each in points]),
        [event for each in points for event in each.events][-COARSE_EVENTS:],
        pools,
    )


def _mean_load(points: Sequence[HistoryPoint | PoolHistoryPoint]) -> tuple[float, float]:
    return _mean([each.demand_rps for each in points]), _mean([each.capacity_rps for each in points])


def _merged_tiers(several: Sequence[Sequence[TierHistoryPoint]]) -> list[TierHistoryPoint]:
    return [
        _merged_tier([each for tiers in several for each in tiers if each.name == tier.name]) for tier in several[-1]
    ]


def _merged_tier(points: Sequence[TierHistoryPoint]) -> TierHistoryPoint:
    return TierHistoryPoint(
        points[-1].name,
        max(each.depth for each in points),
        max(each.oldest_ms for each in points),
        _mean([each.in_rps for each in points]),
        _mean([each.out_rps for each in points]),
        _mean([each.shed_rps for each in points]),
        min(each.limit_ratio for each in points),
        _highest([each.p50_ms for each in points]),
        _highest([each.p95_ms for each in points]),
        _highest([each.p99_ms for each in points]),
        _mean([each.failed_rps for each in points]),
    )


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 3)


def _highest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def downsampled(points: Sequence[HistoryPoint], now_ms: int) -> list[HistoryPoint]:
    """The points of the last 60 minutes, those older than five minutes merged. Merged points stay as they are."""
    kept: list[HistoryPoint] = []
    older: list[HistoryPoint] = []
    fine_from = (now_ms - FINE_MS) // COARSE_MS * COARSE_MS  # Only complete intervals are merged.
    for point in points:
        if point.at_ms <= now_ms - KEEP_MS:
            continue
        if older and point.at_ms // COARSE_MS != older[0].at_ms // COARSE_MS:
            kept.append(_merged(older))
            older = []
        if point.at_ms < fine_from:
            older.append(point)
        else:
            kept.append(point)
    return [*kept, _merged(older)] if older else kept
