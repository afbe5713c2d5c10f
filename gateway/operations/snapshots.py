"""Dashboard snapshots of the system, one per second, their history, and the browsers that subscribe to them.

Some changes cause a snapshot at once: a worker is lost or returns, Redis or the catalog becomes unavailable or available,
the gateway shuts down. The history covers 60 minutes: one point every two seconds for the last five minutes, before that
one every 20 seconds, so that the first message to a browser stays small. It is kept in memory and, while Redis responds,
in a Redis list, so that a new gateway shows the same. Subscribers get one document per second, the same bytes
for all. Their number is limited, and a slow one does not delay the others.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from gateway.catalog import CatalogView, SnapshotView
from gateway.http.response import encode_json
from gateway.http.sse import EventStream
from gateway.operations.health.collector import HealthCollector, merge_pools
from gateway.operations.health.model import LEVELS, Health
from gateway.operations.state import DashboardEvent, DashboardState, TierState, changes, config_changes, state
from ledger.batches import OpenBatches
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.history import KEEP_MS, STEP_MS, HistoryStore
from scheduler.tasks import next_tick


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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HistoryPoint).decode


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


FINE_MS = 5 * 60_000
"""The age up to which every point is kept."""

COARSE_MS = 20_000
"""The time between older points."""

MAX_KEPT = FINE_MS // STEP_MS + (KEEP_MS - FINE_MS) // COARSE_MS
MAX_POOLS = 8
"""Pools with a history of their own."""

COARSE_EVENTS = 10
"""Events of one older point; the oldest are dropped."""


def merged(points: Sequence[HistoryPoint]) -> HistoryPoint:
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
            kept.append(merged(older))
            older = []
        if point.at_ms < fine_from:
            older.append(point)
        else:
            kept.append(point)
    return [*kept, merged(older)] if older else kept


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
            await self._load()
        except RedisUnavailable:
            self._append(state)
            return
        if not self._has(state):  # Another gateway may have written this point.
            await self._write(self._append(state))

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

    async def _load(self) -> None:
        """Once: insert the stored points of other gateways before this gateway's own."""
        if self._loaded:
            return
        stored = [each for each in map(_read, await self._history.read()) if each is not None]
        first_ms = self._ring[0].at_ms if self._ring else None
        before = [each for each in stored if first_ms is None or each.at_ms < first_ms]
        self._keep([*before, *self._ring])
        self._loaded = True

    async def _write(self, newest: HistoryPoint) -> None:
        try:
            if not await self._history.has_turn():
                return
            stored = await self._history.add(_encode(newest))
            if stored == 1 and len(self._ring) > 1:
                await self._history.add_older([_encode(each) for each in reversed(list(self._ring)[:-1])])
        except RedisUnavailable:
            return  # The point stays in memory; the list has a gap.

    async def close(self) -> None:
        """Let another gateway write."""
        try:
            await self._history.release()
        except RedisUnavailable:
            return  # The lock expires by itself.


def _read(packed: bytes) -> HistoryPoint | None:
    """A stored point; None if another version wrote it in another format."""
    try:
        return _decode(packed)
    except msgspec.MsgspecError:
        return None


MAX_SUBSCRIBERS = 32
RETRY = b"retry: 2000\n\n"
"""Milliseconds until a browser reconnects."""


def message(kind: str, data: bytes) -> bytes:
    """One server-sent event; `data` is one line."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class Subscribers:
    """All open streams. `missed`: documents that were not sent because a client was too slow."""

    def __init__(self) -> None:
        self._open: dict[EventStream, asyncio.Future[None]] = {}
        self.missed = 0

    def __len__(self) -> int:
        return len(self._open)

    def check_limit(self) -> None:
        """Raises RequestError `no_capacity` if too many streams are open."""
        if len(self._open) >= MAX_SUBSCRIBERS:
            raise RequestError(ErrorCode.NO_CAPACITY, "Too many dashboards are open at this gateway.")

    async def serve(self, stream: EventStream, opening: bytes, lasts_s: float) -> None:
        """Send `opening`, then all published events for `lasts_s`. Raises ConnectionResetError if the client left."""
        stream.start()
        stream.send(RETRY + opening)
        ended = self._open[stream] = asyncio.get_running_loop().create_future()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(lasts_s):
                    await ended
        finally:
            del self._open[stream]
        stream.end()

    def publish(self, events: bytes) -> None:
        """Send to all streams but those with a full buffer. The server closes a connection whose client stops reading."""
        for stream in self._open:
            if stream.full:
                self.missed += 1
            else:
                stream.send(events)

    def end(self) -> None:
        """End all streams, because the gateway shuts down: browsers reconnect to another gateway."""
        for ended in self._open.values():
            if not ended.done():
                ended.set_result(None)


INTERVAL_S = 1.0
POLL_S = 0.25
MAX_EVENTS = 50
"""Events per document; the oldest are dropped."""


class DashboardSnapshot(NamedTuple):
    """The system at one time. `at`: monotonic seconds."""

    at: float
    urgent_state: object
    status: int
    health: Health
    state: DashboardState


class DashboardSnapshots:
    """Takes and publishes snapshots. `clock`: monotonic seconds; `wall`: seconds since the epoch."""

    def __init__(
        self,
        collector: HealthCollector,
        catalog: CatalogView,
        history: DashboardHistory,
        gateway_id: str,
        *,
        batches: Callable[[], OpenBatches | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._collector = collector
        self._batches = batches
        self._catalog = catalog
        self._gateway_id = gateway_id
        self._clock = clock
        self._wall = wall
        self._latest: DashboardSnapshot | None = None
        self._configuration: SnapshotView | None = None
        self._taking = asyncio.Lock()
        self._unpublished: deque[DashboardEvent] = deque(maxlen=MAX_EVENTS)
        self.history = history
        self.subscribers = Subscribers()

    async def current(self) -> DashboardSnapshot:
        """The latest snapshot, at most a second old."""
        async with self._taking:
            latest = self._latest
            if latest is None or self._is_old(latest):
                latest = await self._take(latest)
            return latest

    def age_s(self, snapshot: DashboardSnapshot) -> float:
        """Seconds since it was taken."""
        return round(max(0.0, self._clock() - snapshot.at), 3)

    async def run(self) -> None:
        """Take, publish and keep snapshots; never returns."""
        published: DashboardSnapshot | None = None
        while True:
            with LoggedFaults("the snapshot failed"):
                latest = await self.current()
                if latest is not published:
                    published = latest
                    await self._publish(latest)
            await next_tick(POLL_S)

    def opening(self, pool: str = "") -> bytes:
        """The first events of a new stream: the history, of one pool if named, and the latest snapshot."""
        events = message("history", encode_json([point.of_pool(pool) for point in self.history.all]))
        return events if self._latest is None else events + message("state", encode_json(self._latest.state))

    async def _publish(self, latest: DashboardSnapshot) -> None:
        # Events of snapshots that were taken for a health request are published with the next one.
        state = msgspec.structs.replace(latest.state, events=list(self._unpublished))
        self._unpublished.clear()
        self.subscribers.publish(message("state", encode_json(state)))
        await self.history.add(state)

    def _is_old(self, latest: DashboardSnapshot) -> bool:
        return self._clock() - latest.at >= INTERVAL_S or self._collector.urgent_state() != latest.urgent_state

    async def _take(self, before: DashboardSnapshot | None) -> DashboardSnapshot:
        urgent_state, at = self._collector.urgent_state(), self._clock()
        pools = await self._collector.collect()
        status, document = merge_pools(
            {pool: (each.status, each.document) for pool, each in pools.items()}, self._collector.draining
        )
        catalog = self._catalog.snapshot
        rows, cordoned = (catalog.tiers, catalog.cordoned) if catalog else ((), frozenset[str]())
        known = [row for row in rows if row.name in document["tiers"]]
        at_ms = round(self._wall() * 1000)
        now = state(
            pools,
            document,
            known,
            at_ms=at_ms,
            gateway=self._gateway_id,
            cordoned=cordoned,
            batches=self._batches(),
        )
        if before is not None:
            self._unpublished += changes(before.state, now)
            self._unpublished += config_changes(self._configuration, catalog, at_ms)
        self._configuration = catalog
        self._latest = DashboardSnapshot(at, urgent_state, status, document, now)
        return self._latest
