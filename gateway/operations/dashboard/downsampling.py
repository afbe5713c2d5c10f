"""Downsampling of the history: one point every two seconds for the last five minutes, before that one every 20 seconds."""

from collections.abc import Sequence

from gateway.operations.dashboard.history_points import COARSE_EVENTS, HistoryPoint
from gateway.operations.figures import merged
from scheduler.protocol.history import KEEP_MS

FINE_MS = 5 * 60_000
"""The age up to which every point is kept."""

COARSE_MS = 20_000
"""The time between older points."""


def _merged(points: Sequence[HistoryPoint]) -> HistoryPoint:
    """One point for several, at the time of the last: mean rates, and the worst of depth, limit and response times."""
    if len(points) == 1 and len(points[0].events) <= COARSE_EVENTS:  # Most are merged already.
        return points[0]
    return merged(HistoryPoint, points)


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
