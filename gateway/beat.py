"""Four times a second: say that this gateway lives and what it measures, and look at the pool.

What is seen feeds the limits and health. Without the heartbeat for two seconds the pool takes this gateway for dead
and drops its queued work.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.catalog_view import CatalogView, SnapshotView
from gateway.fault_log import log_fault
from gateway.limits import LiveLimits
from gateway.meter import Meter
from scheduler.errors import TierlaneError
from scheduler.observation import GatewayStats, Observation

BEAT_S = 0.25


class PresenceCalls(Protocol):
    """`Presence`, as far as the gateway uses it."""

    async def gateway_beat(self, stats: GatewayStats) -> bool: ...

    async def observe(self, tiers: Sequence[str]) -> Observation: ...


class Beat:
    """The heartbeat and the last look at the pool. `clock` is monotonic seconds."""

    def __init__(
        self,
        presence: PresenceCalls,
        catalog: CatalogView,
        limits: LiveLimits,
        meter: Meter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._presence = presence
        self._catalog = catalog
        self._limits = limits
        self._meter = meter
        self._clock = clock
        self.observation: Observation | None = None
        self.observed_at = 0.0
        self.redis_problem: str | None = None

    async def run(self) -> None:
        """Beat forever."""
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        """One heartbeat and one look; keeps the last look when Redis does not answer."""
        snapshot = self._catalog.snapshot
        tiers = [tier.name for tier in snapshot.tiers] if snapshot else []
        try:
            await self._presence.gateway_beat(self._meter.beat(tiers, self._clock()))
            observation = await self._presence.observe(tiers)
        except TierlaneError as error:
            self._missed(str(error), snapshot)
        except Exception as error:  # noqa: BLE001  # no fault may end this loop
            log_fault("the heartbeat failed", error)
            self._missed(f"{type(error).__name__} in the heartbeat", snapshot)
        else:
            self._seen(observation, snapshot)

    def _seen(self, observation: Observation, snapshot: SnapshotView | None) -> None:
        self.observation, self.observed_at = observation, self._clock()
        self.redis_problem = None
        if snapshot:
            self._limits.observe(observation, snapshot, self.observed_at)

    def _missed(self, problem: str, snapshot: SnapshotView | None) -> None:
        self.redis_problem = problem
        if snapshot:
            self._limits.lapse(snapshot, self._clock())

    def age_s(self) -> float | None:
        """Seconds since the last look at the pool; None when there was none."""
        return None if self.observation is None else self._clock() - self.observed_at
