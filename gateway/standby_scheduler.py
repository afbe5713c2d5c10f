"""What a gateway does while no scheduler passes: the schedulers' work, in its own process, until one passes again.

All of that work is scripts on Redis, of which any number of processes may run any number at a time: that a scheduler comes
back before a gateway has noticed does no harm. Two gateways are enough, so at most two of all that beat do it.
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

MOST = 2
BEATS_MS = 1000.0
"""A gateway that was silent for so long is not counted on."""

AGAIN_S = 2.0
"""Until it is tried again where Redis did not answer, or did not allow it: its user may have less rights than a scheduler's."""

Schedule = Callable[[str, asyncio.Event], Coroutine[Any, Any, None]]
"""Does for a pool what a scheduler does, until the event is set."""

log = structlog.get_logger("gateway")


class SchedulerSilence:
    """For how many seconds no scheduler has passed while this gateway could see it. Pure: `now_s` is monotonic.

    A look that failed begins anew: schedulers may not have reached Redis either.
    """

    def __init__(self) -> None:
        self._passed_ms: float | None = None
        self._since_s: float | None = None

    def after(self, seen: Observation | None, now_s: float) -> float:
        """Take a look, None for one that failed."""
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
    """Whether this gateway is one of the few that are to stand in. Pure, and the same at every gateway."""
    beating = sorted(name for name, age_ms in seen.gateway_ages_ms.items() if age_ms < BEATS_MS)
    return gateway_id in beating[:MOST]


class StandbyScheduler:
    """One pool's. `allowed` makes a call that only schedulers make; it may raise RedisUnavailable."""

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

    def looked(self, seen: Observation | None) -> None:
        """A look at the pool, None for one that failed: then everything stays as it is."""
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
        """Stand in whenever it is wanted, for ever."""
        while True:
            await self._wanted.wait()
            try:
                await self._allowed()
                self._refusal = ""
                log.warning("no scheduler passes: this gateway stands in", pool=self._config.pool)
                await self._schedule(self._config.pool, self._stop)
                log.info("this gateway stands in no more", pool=self._config.pool)
                continue
            except RedisUnavailable as error:
                self._refused(str(error))
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("standing in for schedulers failed", error)
            await asyncio.sleep(AGAIN_S)

    def _refused(self, reason: str) -> None:
        if reason != self._refusal:
            log.warning("cannot stand in for schedulers", pool=self._config.pool, reason=reason)
        self._refusal = reason
