"""One snapshot of the system a second, its history, and the browsers that watch it.

A snapshot is taken before its second is over where something changed that cannot wait: a worker is lost or back, Redis
or the catalog goes or returns, the gateway leaves. The history is the last quarter of an hour, one point every two
seconds, in memory and, where Redis responds, in its list, so that a new gateway shows the same. Watchers get one
document a second, the same bytes for all; they are few and cannot block each other.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from gateway.catalog import CatalogView
from gateway.http.response import encode_json
from gateway.http.sse import EventStream
from gateway.operations.health_collector import HealthCollector, together
from gateway.operations.health_model import Health
from gateway.operations.state import DashboardEvent, DashboardState, changes, state
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.history import MOMENTS, STEP_MS, HistoryStore


class TierHistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """One tier: as `TierState`."""

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
    failed_rps: float = 0.0  # Older gateways keep none.


class HistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """What the charts draw, and what happened since the moment before."""

    at_ms: int
    status: str
    demand_rps: float
    capacity_rps: float
    tiers: list[TierHistoryPoint]
    events: list[DashboardEvent]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HistoryPoint).decode


def moment(state: DashboardState, events: list[DashboardEvent]) -> HistoryPoint:
    """What is kept of a document of state."""
    tiers = [
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
        for tier in state.tiers
    ]
    return HistoryPoint(state.at_ms, state.status, state.demand_rps, state.capacity_rps, tiers, events)


class DashboardHistory:
    """The ring. `note` is called with every new document."""

    def __init__(self, history: HistoryStore) -> None:
        self._history = history
        self._ring: deque[HistoryPoint] = deque(maxlen=MOMENTS)
        self._since: list[DashboardEvent] = []
        self._known = False  # What others kept was read.

    @property
    def all(self) -> list[HistoryPoint]:
        """All of them, the oldest first."""
        return list(self._ring)

    async def note(self, state: DashboardState) -> None:
        """Keep a moment where the last one is two seconds old. Never raises for a Redis that is away."""
        self._since += state.events
        if self._has(state):
            return
        try:
            await self._begin()
        except RedisUnavailable:
            self._take(state)
            return
        if not self._has(state):  # As others may have told just now.
            await self._write(self._take(state))

    def _has(self, state: DashboardState) -> bool:
        return bool(self._ring) and state.at_ms // STEP_MS <= self._ring[-1].at_ms // STEP_MS

    def _take(self, state: DashboardState) -> HistoryPoint:
        taken, self._since = moment(state, self._since), []
        self._ring.append(taken)
        return taken

    async def _begin(self) -> None:
        """Once: put what others kept before what this gateway has seen itself."""
        if self._known:
            return
        kept = [each for each in map(_read, await self._history.read()) if each is not None]
        first_ms = self._ring[0].at_ms if self._ring else None
        before = [each for each in kept if first_ms is None or each.at_ms < first_ms]
        self._ring = deque([*before, *self._ring], maxlen=MOMENTS)
        self._known = True

    async def _write(self, newest: HistoryPoint) -> None:
        try:
            if not await self._history.has_turn():
                return
            kept = await self._history.add(_encode(newest))
            if kept == 1 and len(self._ring) > 1:
                await self._history.add_older([_encode(each) for each in reversed(list(self._ring)[:-1])])
        except RedisUnavailable:
            return  # It stays in memory, and the list has a gap.

    async def close(self) -> None:
        """Let another gateway write."""
        try:
            await self._history.give_up()
        except RedisUnavailable:
            return  # The turn runs out by itself.


def _read(packed: bytes) -> HistoryPoint | None:
    """None for what another version wrote in another form."""
    try:
        return _decode(packed)
    except msgspec.MsgspecError:
        return None


MAX_READERS = 32
RETRY = b"retry: 2000\n\n"
"""How long, in ms, a page waits before it comes again."""


def message(kind: str, data: bytes) -> bytes:
    """One event of a stream; `data` is one line."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class Subscribers:
    """All open streams. `missed` counts documents that a reader was too slow for."""

    def __init__(self, most: int = MAX_READERS) -> None:
        self._most = most
        self._open: dict[EventStream, asyncio.Future[None]] = {}
        self.missed = 0

    def __len__(self) -> int:
        return len(self._open)

    def check_room(self) -> None:
        """Raises RequestError `no_capacity` where there are too many."""
        if len(self._open) >= self._most:
            raise RequestError(ErrorCode.NO_CAPACITY, "Too many dashboards are open at this gateway.")

    async def play(self, stream: EventStream, opening: bytes, lasts_s: float) -> None:
        """Send `opening`, and then whatever is published, for so long. Raises ConnectionResetError for a client that is gone."""
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
        """Send to all that keep up. What a slow one misses is gone; the edge drops it when it does not read at all."""
        for stream in self._open:
            if stream.full:
                self.missed += 1
            else:
                stream.send(events)

    def end(self) -> None:
        """The gateway leaves: pages go to another one."""
        for ended in self._open.values():
            if not ended.done():
                ended.set_result(None)


EVERY_S = 1.0
LOOK_S = 0.25
EVENTS = 50
"""The newest that a document brings along."""


class DashboardSnapshot(NamedTuple):
    """One picture. `at` is monotonic seconds; `state.events` are those since the picture before."""

    at: float
    facts: object
    status: int
    health: Health
    state: DashboardState


class DashboardSnapshots:
    """Takes them. `clock` is monotonic seconds, `wall` seconds since the epoch."""

    def __init__(
        self,
        judging: HealthCollector,
        catalog: CatalogView,
        moments: DashboardHistory,
        gateway_id: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._judging = judging
        self._catalog = catalog
        self._gateway_id = gateway_id
        self._clock = clock
        self._wall = wall
        self._latest: DashboardSnapshot | None = None
        self._taking = asyncio.Lock()
        self._untold: deque[DashboardEvent] = deque(maxlen=EVENTS)
        self.moments = moments
        self.readers = Subscribers()

    async def current(self) -> DashboardSnapshot:
        """The latest, which is at most a second old."""
        async with self._taking:
            latest = self._latest
            if latest is None or self._is_old(latest):
                latest = await self._take(latest)
            return latest

    def age_s(self, snapshot: DashboardSnapshot) -> float:
        """Seconds since it was taken."""
        return round(max(0.0, self._clock() - snapshot.at), 3)

    async def run(self) -> None:
        """Take, tell and keep, forever."""
        told: DashboardSnapshot | None = None
        while True:
            try:
                latest = await self.current()
                if latest is not told:
                    told = latest
                    await self._tell(latest)
            except Exception as error:  # noqa: BLE001  # no fault may end this loop
                log_fault("the snapshot failed", error)
            await asyncio.sleep(LOOK_S)

    def opening(self) -> bytes:
        """What a page that has just come is told first: the last quarter of an hour, and the latest picture."""
        told = message("history", encode_json(self.moments.all))
        return told if self._latest is None else told + message("state", encode_json(self._latest.state))

    async def _tell(self, latest: DashboardSnapshot) -> None:
        told = msgspec.structs.replace(latest.state, events=self._events())
        self.readers.publish(message("state", encode_json(told)))
        await self.moments.note(told)

    def _events(self) -> list[DashboardEvent]:
        """What nobody was told yet; a picture that was taken for health alone has its events told with the next one."""
        told = list(self._untold)
        self._untold.clear()
        return told

    def _is_old(self, latest: DashboardSnapshot) -> bool:
        return self._clock() - latest.at >= EVERY_S or self._judging.facts() != latest.facts

    async def _take(self, before: DashboardSnapshot | None) -> DashboardSnapshot:
        facts, at = self._judging.facts(), self._clock()
        judged = await self._judging.judge()
        status, document = together({pool: (each.status, each.document) for pool, each in judged.items()})
        catalog = self._catalog.snapshot
        rows, cordoned = (catalog.tiers, catalog.cordoned) if catalog else ((), frozenset[str]())
        known = [row for row in rows if row.name in document["tiers"]]
        at_ms = round(self._wall() * 1000)
        now = state(judged, document, known, at_ms=at_ms, gateway=self._gateway_id, cordoned=cordoned)
        if before is not None:
            self._untold += changes(before.state, now)
        self._latest = DashboardSnapshot(at, facts, status, document, now)
        return self._latest
