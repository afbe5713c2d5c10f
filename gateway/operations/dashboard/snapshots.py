"""Dashboard snapshots of the system, one per second, which go to the history and to the subscribers.

Some changes cause a snapshot at once: a worker is lost or returns, Redis or the catalog becomes unavailable or available,
the gateway shuts down.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from gateway.http.response import encode_json
from gateway.operations.dashboard.diff import config_changes, state_changes
from gateway.operations.dashboard.history import DashboardHistory
from gateway.operations.dashboard.state import DashboardEvent, DashboardState, state
from gateway.operations.dashboard.subscribers import Subscribers, server_event
from gateway.operations.health.collector import HealthCollector
from gateway.operations.health.pool_state import Health, health_document, merge_pools
from ledger.batches import OpenBatches
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import NO_CORDONS, Snapshot
from scheduler.fault_log import LoggedFaults
from scheduler.tasks import next_tick

INTERVAL_S = 1.0
POLL_S = 0.25
MAX_EVENTS = 50
"""Events per document; the oldest are dropped."""


class DashboardSnapshot(NamedTuple):
    """The system at one time. `at`: monotonic seconds."""

    at: float
    urgent_state: object
    health: Health
    state: DashboardState


class DashboardSnapshots:
    """Takes and publishes snapshots. `clock`: monotonic seconds; `wall`: seconds since the epoch."""

    def __init__(
        self,
        collector: HealthCollector,
        catalog: Catalog,
        history: DashboardHistory,
        gateway_id: str,
        *,
        installation: str = "",
        batches: Callable[[], OpenBatches | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._collector = collector
        self._batches = batches
        self._catalog = catalog
        self._gateway_id = gateway_id
        self._installation = installation
        self._clock = clock
        self._wall = wall
        self._latest: DashboardSnapshot | None = None
        self._configuration: Snapshot | None = None
        self._taking = asyncio.Lock()
        self._unpublished: deque[DashboardEvent] = deque(maxlen=MAX_EVENTS)
        self.history = history
        self.subscribers = Subscribers()

    async def current(self) -> DashboardSnapshot:
        """The latest snapshot, at most a second old."""
        async with self._taking:
            latest = self._latest
            if (
                latest is None
                or self._clock() - latest.at >= INTERVAL_S
                or self._collector.urgent_state() != latest.urgent_state
            ):
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
                    # Events of snapshots that were taken for a health request are published with the next one.
                    state = msgspec.structs.replace(latest.state, events=list(self._unpublished))
                    self._unpublished.clear()
                    self.subscribers.publish(server_event("state", encode_json(state)))
                    await self.history.add(state)
            await next_tick(POLL_S)

    def opening(self, pool: str = "") -> bytes:
        """The first events of a new stream: the history, of one pool if named, and the latest snapshot."""
        events = server_event("history", encode_json([point.of_pool(pool) for point in self.history.all]))
        return events if self._latest is None else events + server_event("state", encode_json(self._latest.state))

    async def _take(self, before: DashboardSnapshot | None) -> DashboardSnapshot:
        urgent_state, at = self._collector.urgent_state(), self._clock()
        pools = await self._collector.collect()
        states = {pool: each.state for pool, each in pools.items()}
        whole = merge_pools(states)
        catalog = self._catalog.snapshot
        rows, cordons = (catalog.tiers, catalog.cordons) if catalog else ((), NO_CORDONS)
        known = [row for row in rows if row.name in whole["tiers"]]
        at_ms, batches = round(self._wall() * 1000), self._batches()
        now = state(
            pools,
            whole,
            known,
            at_ms=at_ms,
            gateway=self._gateway_id,
            installation=self._installation,
            cordons=cordons,
            batches=batches,
        )
        if before is not None:
            self._unpublished += state_changes(before.state, now)
            self._unpublished += config_changes(self._configuration, catalog, at_ms)
        self._configuration = catalog
        document = health_document(whole, states, self._collector.draining, self._installation)
        self._latest = DashboardSnapshot(at, urgent_state, document, now)
        return self._latest
