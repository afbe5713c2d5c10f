"""The history of the dashboard: 60 minutes of points, and a week of points of five minutes.

Both are kept in memory and, while Redis responds, in Redis lists, so that a new gateway shows the same.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from gateway.operations.dashboard.downsampling import COARSE_MS, FINE_MS, downsampled, week_points
from gateway.operations.dashboard.history_points import HistoryPoint, history_point
from gateway.operations.dashboard.state import DashboardEvent, DashboardState
from scheduler.errors import RedisUnavailable
from scheduler.protocol.history import KEEP_MS, STEP_MS, WEEK, HistoryStore

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HistoryPoint).decode
_decode_raw = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode

MAX_KEPT = FINE_MS // STEP_MS + (KEEP_MS - FINE_MS) // COARSE_MS


def _interval(packed: bytes) -> int | None:
    """The number of the interval of a packed point of a week; None if another version wrote it in another format."""
    try:
        return int(msgspec.msgpack.decode(_decode_raw(packed)[0])) // WEEK.step_ms
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError):
        return None


class WeekHistory:
    """The points of the last seven days. They are made of those of the last hour, and kept packed: there are 2,016."""

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self._points: dict[int, bytes] = {}  # By the number of their interval, in order.
        self._loaded = False  # Whether the points of other gateways were read.
        self._added = -1  # The number of the interval of the last call of `add`.

    def since(self, first_ms: int) -> list[HistoryPoint]:
        """The points from a time on, milliseconds since the epoch; the oldest first. Takes milliseconds, so it may run in a thread."""
        points = self._points  # Replaced, never changed.
        wanted = (packed for number, packed in points.items() if number >= first_ms // WEEK.step_ms)
        return [point for point in map(read_point, wanted) if point is not None]

    def is_due(self, at_ms: int) -> bool:
        """Whether an interval has ended since the last call of `add`."""
        return at_ms // WEEK.step_ms != self._added

    async def add(self, hour: Sequence[HistoryPoint], *, writes: bool) -> None:
        """Add the intervals that ended. `hour`: the points of the last 60 minutes; `writes`: this gateway writes to Redis."""
        self._added = now = hour[-1].at_ms // WEEK.step_ms
        with suppress(RedisUnavailable):
            if not self._loaded:
                stored = [(_interval(packed), packed) for packed in await self._store.read()]
                self._points = {number: packed for number, packed in stored if number is not None} | self._points
                self._loaded = True
        last = max((number for number in self._points if number < now), default=-1)
        fresh = week_points(hour, last, now)
        known = self._points | {number: _encode(point) for number, point in fresh.items()}
        first = now - WEEK.max_points
        # Without those of a gateway whose clock was ahead.
        self._points = {number: packed for number, packed in sorted(known.items()) if first <= number < now}
        if writes and self._points:
            with suppress(RedisUnavailable):  # The next point is added with those that are missing.
                await self._write()

    async def _write(self) -> None:
        """Add the points that Redis does not have: the newest, after a change of the writer others, after a loss all."""
        newest = await self._store.newest()
        if newest is None:
            *older, last = self._points.values()
            await self._store.add(last)
            if older:
                await self._store.add_older(older[::-1])
            return
        stored, last_number = _interval(newest), max(self._points)
        if stored is None or stored > last_number:  # Of another version, or of a clock that is ahead.
            stored = last_number - 1
        for number, packed in self._points.items():
            if number > stored:
                await self._store.add(packed)


class DashboardHistory:
    """The points of the last 60 minutes, and of a week. `add` is called with every new state."""

    def __init__(self, history: HistoryStore, week: HistoryStore) -> None:
        self._history = history
        self.week = WeekHistory(week)
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
        newest, writes = self._append(state), False
        with suppress(RedisUnavailable):  # The point stays in memory; the list has a gap.
            if writes := await self._history.has_turn():
                count = await self._history.add(_encode(newest))
                if count == 1 and len(self._ring) > 1:
                    await self._history.add_older([_encode(each) for each in reversed(list(self._ring)[:-1])])
        if self.week.is_due(newest.at_ms):
            await self.week.add(self.all, writes=writes)

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
