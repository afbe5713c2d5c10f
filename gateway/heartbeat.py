"""Four times a second: say that this gateway lives and what it measures, and look at the pool.

What is seen feeds the limits and health. Without the heartbeat for two seconds the pool takes this gateway for dead
and drops its queued work.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from gateway.catalog import CatalogView, SnapshotView
from gateway.circuit_breaker import ONCE_MORE, CallWatch
from gateway.inference.submission import greedy_by_default, one_version
from gateway.limits.capacity import LiveLimits
from gateway.limits.demand import DemandMeter
from scheduler.errors import TierlaneError
from scheduler.fault_log import log_fault
from scheduler.protocol.limits import RejectionRecord
from scheduler.protocol.pool_view import Observation
from scheduler.protocol.presence import Presence

BEAT_S = 0.25


class HeartbeatListener(Protocol):
    """Who is told of every heartbeat: the second witness."""

    def heartbeat(self, epoch_us: int) -> None: ...

    def missed(self) -> None: ...


class GatewayHeartbeat:
    """The heartbeat and the last look at the pool. `clock` is monotonic seconds.

    `refusals` gives what was refused since it was called last: it goes with the beat, and is lost with it. `took` is told
    the seconds of each call that Redis answered, `looked` what each look saw, None where it failed. `ended_tasks`: what
    other gateways are told of this one's tasks.
    """

    def __init__(
        self,
        presence: Presence,
        catalog: CatalogView,
        limits: LiveLimits,
        demand_meter: DemandMeter,
        *,
        listener: HeartbeatListener,
        watch: CallWatch = ONCE_MORE,
        refusals: Callable[[], Sequence[RejectionRecord]] = tuple,
        took: Callable[[str, float], None] = lambda *_: None,
        looked: Callable[[Observation | None], None] = lambda _: None,
        ended_tasks: Callable[[], list[str]] = list,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._presence = presence
        self._catalog = catalog
        self._limits = limits
        self._demand_meter = demand_meter
        self._listener = listener
        self._watch = watch
        self._refusals = refusals
        self._took = took
        self._looked = looked
        self._ended_tasks = ended_tasks
        self._clock = clock
        self.observation: Observation | None = None
        self.observed_at = 0.0
        self.redis_problem: str | None = None
        self._epoch_us: int | None = None
        self.eviction_policy = ""  # Of Redis, as it said last.
        self._redis_ahead_ms: float | None = None  # Redis TIME less our clock, at the most.
        self.service_p95_ms = 0.0  # Of a run on the slowest healthy worker; 0 while none has told.
        self.greedy = False  # No worker samples where a request has no temperature.
        self.model_version = ""  # That all healthy workers run; "" while there is not just one.

    async def run(self) -> None:
        """Beat forever."""
        while True:
            await self.heartbeat()
            await asyncio.sleep(BEAT_S)

    async def heartbeat(self) -> None:
        """One heartbeat and one look; keeps the last look when Redis does not answer."""
        snapshot = self._catalog.snapshot
        tiers = [tier.name for tier in snapshot.tiers] if snapshot else []
        self._watch.begun()
        try:
            stats = self._limits.published(self._demand_meter.heartbeat(tiers, self._clock()))
            if ended := self._ended_tasks():
                stats = msgspec.structs.replace(stats, ended_tasks=ended)
            begun_at = self._clock()
            reply = await self._presence.gateway_beat(stats, self._refusals())
            self._limits.memory(reply.memory_share)
            if self._epoch_us not in (None, reply.epoch_us):
                self._limits.emptied(self._clock())
            self._epoch_us = reply.epoch_us
            self.eviction_policy = reply.policy
            self._listener.heartbeat(reply.epoch_us)
            asked_at = self._clock()
            observation = await self._presence.observe(tiers)
            self._took("beat", asked_at - begun_at)
            self._took("observe", self._clock() - asked_at)
            self._redis_ahead_ms = observation.now_ms - asked_at * 1000
            self._watch.answered()
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
        # A Redis that came back empty knows no workers for a moment: what they last told holds.
        healthy = [worker.service_p95_ms for worker in observation.workers if worker.healthy]
        self.service_p95_ms = max(healthy, default=self.service_p95_ms)
        self.model_version = one_version(observation.workers)
        self.greedy = greedy_by_default(observation.workers)
        if snapshot:
            self._limits.observe(observation, snapshot, self.observed_at)
        self._looked(observation)

    def _missed(self, problem: str, snapshot: SnapshotView | None) -> None:
        self.redis_problem = problem
        self._watch.failed()
        self._listener.missed()
        if snapshot:
            self._limits.lapse(snapshot, self._clock())
        self._looked(None)

    def redis_ms(self) -> int:
        """Redis TIME now, in ms and at the latest, by the last look; 0 where there was none."""
        return 0 if self._redis_ahead_ms is None else math.ceil(self._redis_ahead_ms + self._clock() * 1000)

    def age_s(self) -> float | None:
        """Seconds since the last look at the pool; None when there was none."""
        return None if self.observation is None else self._clock() - self.observed_at
