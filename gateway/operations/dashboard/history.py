"""The history of the dashboard: 60 minutes of points.

It is kept in memory and, while Redis responds, in a Redis list, so that a new gateway shows the same.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from gateway.operations.dashboard.downsampling import COARSE_MS, FINE_MS, downsampled
from gateway.operations.dashboard.history_points import HistoryPoint, history_point
from gateway.operations.dashboard.state import DashboardEvent, DashboardState
from scheduler.errors import RedisUnavailable
from scheduler.protocol.history import KEEP_MS, STEP_MS, HistoryStore

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HistoryPoint).decode

MAX_KEPT = FINE_MS // STEP_MS + (KEEP_MS - FINE_MS) // COARSE_MS


class DashboardHistory:
    """The points of the last 60 minutes. `add` is called with every new state."""

    def __init__(self, history: HistoryStore) -> None:
        self._history = history
        self._ring: deque[HistoryPoint] = deque(maxlen=MAX_KEPT + COARSE_MS // STEP_MS)
        self._since: list[DashboardEvent] = []  # Events since the last point.
        self._loaded = False  # Whether the points of other gateways were read.

    @property
    def all(self) -> list[HistoryPoint]:
        """All points, the oldest first."""
        return list(self._ring)

    async def add(self, state: DashboardState) -> None:
        """Add a point if the last one is two seconds old. Does not raise if Redis is unavailable."""
        self._since += state.events
        if self._has(state):
            return
        try:
            if not self._loaded:  # Insert the stored points of other gateways before this gateway's own.
                stored = [each for each in map(read_point, await self._history.read()) if each is not None]
                first_ms = self._ring[0].at_ms if self._ring else None
                before = [each for each in stored if first_ms is None or each.at_ms < first_ms]
                self._keep([*before, *self._ring])
                self._loaded = True
        except RedisUnavailable:
            self._append(state)
            return
        if self._has(state):  # Another gateway has written this point.
            return
        newest = self._append(state)
        with suppress(RedisUnavailable):  # The point stays in memory; the list has a gap.
            if await self._history.has_turn():
                count = await self._history.add(_encode(newest))
                if count == 1 and len(self._ring) > 1:
                    await self._history.add_older([_encode(each) for each in reversed(list(self._ring)[:-1])])

    def _has(self, state: DashboardState) -> bool:
        return bool(self._ring) and state.at_ms // STEP_MS <= self._ring[-1].at_ms // STEP_MS

    def _append(self, state: DashboardState) -> HistoryPoint:
        point, self._since = history_point(state, self._since), []
        if self._ring and self._ring[-1].at_ms // COARSE_MS != point.at_ms // COARSE_MS:
            self._keep([*self._ring, point])
        else:
            self._ring.append(point)
        return point

    def _keep(self, points: Sequence[HistoryPoint]) -> None:
        self._ring = deque(downsampled(points, points[-1].at_ms) if points else (), self._ring.maxlen)

    async def close(self) -> None:
        """Let another gateway write."""
        with suppress(RedisUnavailable):  # The lock expires by itself.
            await self._history.release()


def read_point(packed: bytes) -> HistoryPoint | None:
    """A stored point; None if another version wrote it in another format."""
    try:
        return _decode(packed)
    except msgspec.MsgspecError:
        return None
