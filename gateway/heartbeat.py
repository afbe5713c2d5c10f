"""The gateway's heartbeat: four times a second it sends measurements to Redis and observes the pool.

The observation is the input of the limits and of health. Without a heartbeat for two seconds the pool considers this
gateway lost, and ends its queued requests.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from gateway.circuit_breaker import ONCE_MORE, CallWatch
from gateway.inference.worker_views import greedy_by_default, one_version, passes_chats_on
from gateway.limits.capacity import LiveLimits
from gateway.limits.demand import DemandMeter
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Snapshot
from scheduler.errors import TierlaneError
from scheduler.fault_log import log_fault
from scheduler.protocol.limits import RejectionRecord
from scheduler.protocol.pool_view import Observation, WorkerView, combined, with_moving
from scheduler.protocol.presence import Presence
from scheduler.tasks import next_tick

BEAT_S = 0.25
KEEP_WORKERS_S = 2.0
"""How long the workers that a Redis knew before it lost its data count as those of its cell. They register again meanwhile, or
return from the cells to which they went."""

T = TypeVar("T")


class HeartbeatListener(Protocol):
    """Receives the result of every heartbeat."""

    def heartbeat(self, epoch_us: int) -> None: ...

    def missed(self) -> None: ...


class GatewayHeartbeat:
    """Sends heartbeats, and keeps the last observation of the pool. `clock`: monotonic seconds.

    `rejections`: returns the rejections since its last call; they are sent with the heartbeat, and lost if it fails. `took`:
    receives the duration of each successful call in seconds. `observed`: receives each observation, None if it failed.
    `others`: returns recent ones of the pool in other cells. `ended_tasks`: tasks of this gateway that other gateways report.
    """

    def __init__(
        self,
        presence: Presence,
        catalog: Catalog,
        limits: LiveLimits,
        demand_meter: DemandMeter,
        *,
        listener: HeartbeatListener,
        watch: CallWatch = ONCE_MORE,
        rejections: Callable[[], Sequence[RejectionRecord]] = tuple,
        took: Callable[[str, float], None] = lambda *_: None,
        observed: Callable[[Observation | None], None] = lambda _: None,
        others: Callable[[], Sequence[Observation]] = tuple,
        ended_tasks: Callable[[], list[str]] = list,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._presence = presence
        self._catalog = catalog
        self._limits = limits
        self._demand_meter = demand_meter
        self._listener = listener
        self._watch = watch
        self._rejections = rejections
        self._took = took
        self._observed = observed
        self._others = others
        self._ended_tasks = ended_tasks
        self._clock = clock
        self.observation: Observation | None = None
        self.whole: Observation | None = None  # The pool in all cells, as if it had one queue.
        self.observed_at = 0.0
        self.redis_problem: str | None = None
        self._epoch_us: int | None = None
        self._served_by: Sequence[WorkerView] = ()  # The workers of the last observation with a healthy one.
        self._served_until = -math.inf  # Until then these count, although Redis has lost its data.
        self.eviction_policy = ""  # Redis' maxmemory-policy in the last reply.
        self._redis_ahead_ms: float | None = None  # Upper bound of Redis TIME minus the local clock.
        self.service_p95_ms = 0.0  # Duration of a run on the slowest healthy worker; 0 until one is measured.
        self.passes_on: bool | None = None  # All workers pass chats on to a server; None before a worker is known.
        self.greedy = False  # No worker samples if a request has no temperature.
        self.model_version = ""  # The version that all healthy workers run; "" if they run several.

    async def run(self) -> None:
        """Send heartbeats; never returns."""
        while True:
            await self.heartbeat()
            await next_tick(BEAT_S)

    async def heartbeat(self) -> None:
        """Send a heartbeat and observe the pool. The last observation is kept if Redis does not respond."""
        snapshot = self._catalog.snapshot
        tiers = [tier.name for tier in snapshot.tiers] if snapshot else []
        self._watch.begun()
        try:
            stats = self._limits.published(self._demand_meter.heartbeat(tiers, self._clock()))
            if ended := self._ended_tasks():
                stats = msgspec.structs.replace(stats, ended_tasks=ended)
            # Sent at once, in this order: Redis reads both when it wakes up.
            sent_at = self._clock()
            reply, observation = await asyncio.gather(
                self._timed("beat", lambda: self._presence.gateway_beat(stats, self._rejections())),
                self._timed("observe", lambda: self._presence.observe(tiers)),
            )
            self._limits.memory(reply.memory_share)
            if self._epoch_us not in (None, reply.epoch_us):
                self._limits.emptied(self._clock() + self._presence.gone_ms / 1000)
                self._served_until = self._clock() + KEEP_WORKERS_S
            self._epoch_us = reply.epoch_us
            self.eviction_policy = reply.policy
            self._listener.heartbeat(reply.epoch_us)
            self._redis_ahead_ms = observation.now_ms - sent_at * 1000
            self._watch.answered()
        except TierlaneError as error:
            self._missed(str(error), snapshot)
        except Exception as error:  # noqa: BLE001  # no fault may end this loop
            log_fault("the heartbeat failed", error)
            self._missed(f"{type(error).__name__} in the heartbeat", snapshot)
        else:
            self._seen(observation, snapshot)

    async def _timed(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """`call` makes the coroutine: a gateway that stops may cancel this task before it begins."""
        began = self._clock()
        result = await call()
        self._took(name, self._clock() - began)
        return result

    def _seen(self, observation: Observation, snapshot: Snapshot | None) -> None:
        before, self.observation, self.observed_at = self.observation, observation, self._clock()
        if observation.healthy_gpus:
            self._served_by = observation.workers
        others = self._others()
        counted = with_moving(observation, before) if others else observation
        whole = self.whole = combined([counted, *others])
        self.redis_problem = None
        # After a loss of its data, Redis has no workers for a short time: keep the last value.
        healthy = [worker.service_p95_ms for worker in whole.workers if worker.healthy]
        self.service_p95_ms = max(healthy, default=self.service_p95_ms)
        self.model_version = one_version(whole.workers)
        self.greedy = greedy_by_default(whole.workers)
        if whole.workers:  # Else the last value, while all workers restart.
            self.passes_on = passes_chats_on(whole.workers)
        if snapshot:
            self._limits.observe(observation, snapshot, self.observed_at, whole)
        self._observed(counted)

    def _missed(self, problem: str, snapshot: Snapshot | None) -> None:
        self.redis_problem = problem
        self._watch.failed()
        self._listener.missed()
        if snapshot:
            self._limits.lapse(snapshot, self._clock())
        self._observed(None)

    @property
    def workers(self) -> Sequence[WorkerView]:
        """The workers that direct mode calls: those that served this cell; if there was none, those of the pool in other cells.

        The customers of other cells keep their workers, also while a Redis that has lost its data does not know those of this
        cell yet.
        """
        seen = self.observation
        has_workers = seen is not None and seen.healthy_gpus > 0
        if self._served_by and (has_workers or self.observed_at < self._served_until):
            return self._served_by
        others = self._others()
        return combined(others).workers if others else seen.workers if seen is not None else ()

    def redis_ms(self) -> int:
        """An upper bound of Redis TIME now, in ms, from the last observation; 0 before the first."""
        return 0 if self._redis_ahead_ms is None else math.ceil(self._redis_ahead_ms + self._clock() * 1000)

    def age_s(self) -> float | None:
        """Seconds since the last observation; None before the first."""
        return None if self.observation is None else self._clock() - self.observed_at
