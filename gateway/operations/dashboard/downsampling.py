"""Downsampling of the history: one point every two seconds for the last five minutes, before that one every 20 seconds.

The history of a week has one point for each five minutes.
"""

from collections.abc import Sequence
from itertools import groupby

import msgspec

from gateway.operations.dashboard.history_points import COARSE_EVENTS, HistoryPoint, main_events
from gateway.operations.figures import merged
from scheduler.protocol.history import KEEP_MS, WEEK

FINE_MS = 5 * 60_000
"""The age up to which every point is kept."""

COARSE_MS = 20_000
"""The time between older points."""

WEEK_EVENTS = 6
"""Events of a point of a week."""


def _merged(points: Sequence[HistoryPoint]) -> HistoryPoint:
    """One point for several, at the time of the last: mean rates, and the worst of depth, limit and response times."""
    if len(points) == 1 and len(points[0].events) <= COARSE_EVENTS:  # Most are merged already.
        return points[0]
    return merged(HistoryPoint, points)


def week_points(points: Sequence[HistoryPoint], after: int, before: int) -> dict[int, HistoryPoint]:
    """The points of the history of a week by the number of their interval, which is over `after` and under `before`.

    `points`: those of the last 60 minutes; each time in an interval counts the same, however many points it has.
    """
    wanted = [each for each in points if after < each.at_ms // WEEK.step_ms < before]
    coarse = [_merged(list(group)) for _, group in groupby(wanted, lambda each: each.at_ms // COARSE_MS)]
    found: dict[int, HistoryPoint] = {}
    for number, group in groupby(coarse, lambda each: each.at_ms // WEEK.step_ms):
        point = merged(HistoryPoint, list(group))
        found[number] = msgspec.structs.replace(point, events=main_events(point.events, WEEK_EVENTS))
    return found


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
