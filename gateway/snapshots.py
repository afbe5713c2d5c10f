"""One picture of the whole a second: health, the page for on-call and its history are all answered from it.

It is taken anew before its second is over where something changed that cannot wait: a worker is lost or back, Redis or
the catalog goes or returns, the gateway leaves.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from gateway.catalog import CatalogView
from gateway.changes import changes
from gateway.health_pools import together
from gateway.http.response import encode_json
from gateway.operations.health_collector import Judging
from gateway.operations.health_model import Health
from gateway.operations.snapshots import Moments
from gateway.operations.state import Event, State, state
from gateway.readers import Readers, message
from scheduler.fault_log import log_fault

EVERY_S = 1.0
LOOK_S = 0.25
EVENTS = 50
"""The newest that a document brings along."""


class Snapshot(NamedTuple):
    """One picture. `at` is monotonic seconds; `state.events` are those since the picture before."""

    at: float
    facts: object
    status: int
    health: Health
    state: State


class Snapshots:
    """Takes them. `clock` is monotonic seconds, `wall` seconds since the epoch."""

    def __init__(
        self,
        judging: Judging,
        catalog: CatalogView,
        moments: Moments,
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
        self._latest: Snapshot | None = None
        self._taking = asyncio.Lock()
        self._untold: deque[Event] = deque(maxlen=EVENTS)
        self.moments = moments
        self.readers = Readers()

    async def current(self) -> Snapshot:
        """The latest, which is at most a second old."""
        async with self._taking:
            latest = self._latest
            if latest is None or self._is_old(latest):
                latest = await self._take(latest)
            return latest

    def age_s(self, snapshot: Snapshot) -> float:
        """Seconds since it was taken."""
        return round(max(0.0, self._clock() - snapshot.at), 3)

    async def run(self) -> None:
        """Take, tell and keep, forever."""
        told: Snapshot | None = None
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

    async def _tell(self, latest: Snapshot) -> None:
        told = msgspec.structs.replace(latest.state, events=self._events())
        self.readers.publish(message("state", encode_json(told)))
        await self.moments.note(told)

    def _events(self) -> list[Event]:
        """What nobody was told yet; a picture that was taken for health alone has its events told with the next one."""
        told = list(self._untold)
        self._untold.clear()
        return told

    def _is_old(self, latest: Snapshot) -> bool:
        return self._clock() - latest.at >= EVERY_S or self._judging.facts() != latest.facts

    async def _take(self, before: Snapshot | None) -> Snapshot:
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
        self._latest = Snapshot(at, facts, status, document, now)
        return self._latest
