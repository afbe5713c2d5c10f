"""The work of schedulers in gateways while no scheduler is running.

This work is scripts on Redis that any number of processes may run at the same time, so it is harmless if a scheduler
returns before a gateway notices. Two gateways are sufficient, so at most two do it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from gateway.config import GatewayConfig
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.protocol.pool_view import Observation

MAX_STANDBY = 2
ALIVE_MS = 1000.0
"""A gateway without a heartbeat for this time is not counted."""

RETRY_S = 2.0
"""Until a retry if Redis did not respond, or denied the call: the gateway's Redis user may lack a scheduler's permissions."""

Schedule = Callable[[str, asyncio.Event], Coroutine[Any, Any, None]]
"""Does the work of a scheduler for a pool until the event is set."""

log = structlog.get_logger("gateway")


class SchedulerSilence:
    """For how long no scheduler has been active, as far as this gateway could observe. Pure; `now_s`: monotonic.

    A failed observation restarts the time: schedulers may not have reached Redis either.
    """

    def __init__(self) -> None:
        self._passed_ms: float | None = None
        self._since_s: float | None = None

    def after(self, seen: Observation | None, now_s: float) -> float:
        """Record an observation, None if it failed. Returns the seconds."""
        if seen is None:
            self._since_s = None
            return 0.0
        age_ms = seen.scheduler_age_ms
        passed_ms = None if age_ms is None else seen.now_ms - age_ms
        if self._since_s is None or (passed_ms is not None and passed_ms != self._passed_ms):
            self._since_s = now_s
        self._passed_ms = passed_ms
        return now_s - self._since_s


def is_chosen(gateway_id: str, seen: Observation) -> bool:
    """Whether this gateway does the work. Pure, and the same at every gateway."""
    alive = sorted(name for name, age_ms in seen.gateway_ages_ms.items() if age_ms < ALIVE_MS)
    return gateway_id in alive[:MAX_STANDBY]


class StandbyScheduler:
    """The standby scheduler of one pool. `allowed`: makes a call that only schedulers need; may raise RedisUnavailable."""

    def __init__(
        self,
        config: GatewayConfig,
        schedule: Schedule,
        allowed: Callable[[], Awaitable[object]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._schedule = schedule
        self._allowed = allowed
        self._clock = clock
        self._silence = SchedulerSilence()
        self._wanted = asyncio.Event()
        self._stop = asyncio.Event()
        self._refusal = ""

    def observed(self, seen: Observation | None) -> None:
        """Record an observation of the pool, None if it failed; then nothing changes."""
        silent = self._silence.after(seen, self._clock()) >= self._config.silent_s
        if seen is None:
            return
        wanted = silent and is_chosen(self._config.gateway_id, seen)
        if wanted and not self._wanted.is_set():
            self._stop = asyncio.Event()
            self._wanted.set()
        elif not wanted:
            self._wanted.clear()
            self._stop.set()

    async def run(self) -> None:
        """Do the work of schedulers whenever it is needed; never returns."""
        while True:
            await self._wanted.wait()
            try:
                await self._allowed()
                self._refusal = ""
                log.warning("no scheduler is running: this gateway schedules", pool=self._config.pool)
                await self._schedule(self._config.pool, self._stop)
                log.info("this gateway no longer schedules", pool=self._config.pool)
                continue
            except RedisUnavailable as error:
                self._refused(str(error))
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("scheduling in a gateway failed", error)
            await asyncio.sleep(RETRY_S)

    def _refused(self, reason: str) -> None:
        if reason != self._refusal:
            log.warning("scheduling in this gateway is not possible", pool=self._config.pool, reason=reason)
        self._refusal = reason
