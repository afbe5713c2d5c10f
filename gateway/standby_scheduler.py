"""The work of schedulers in gateways while no scheduler is running, or always where none is deployed.

This work is scripts on Redis that any number of processes may run at the same time, so it is harmless if a scheduler
returns before a gateway notices. Two gateways are sufficient, so at most two do it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from gateway.config import GatewayConfig
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.protocol.pool_view import Observation
from scheduler.tasks import end_all

MAX_STANDBY = 2
ALIVE_MS = 1000.0
"""A gateway without a heartbeat for this time is not counted."""

RETRY_S = 0.5
"""Until a retry if Redis did not respond, or denied the call: the gateway's Redis user may lack a scheduler's permissions."""

CLOSE_S = 2.5
"""Longer than the auditor writes after its stop."""

Schedule = Callable[[str, str, asyncio.Event], Coroutine[Any, Any, None]]
"""Does the work of a scheduler for the cell at a Redis URL and a pool until the event is set; then it writes the audit that waits."""

log = structlog.get_logger("gateway")


class SchedulerSilence:
    """For how long no scheduler has been active, by the clock of Redis alone. Pure.

    The age of the last pass counts once two observations in a row show this pass: a step of Redis' clock looks like a silence
    in one. A failed observation begins anew: schedulers may not have reached Redis either. `expected`: schedulers are
    deployed; else a pool without any pass is silent from the first observation on.
    """

    def __init__(self, *, expected: bool = True) -> None:
        self._expected = expected
        self._passed_ms: float | None = None
        self._since_ms: int | None = None  # The first observation of this pass.

    def after(self, seen: Observation | None) -> float:
        """Record an observation, None if it failed. Returns the milliseconds."""
        if seen is None:
            self._since_ms = None
            return 0.0
        age_ms = seen.scheduler_age_ms
        if not self._expected:
            return float("inf") if age_ms is None else age_ms
        passed_ms = None if age_ms is None else seen.now_ms - age_ms
        if self._since_ms is None or passed_ms != self._passed_ms or seen.now_ms < self._since_ms:
            self._passed_ms, self._since_ms = passed_ms, seen.now_ms
            return 0.0
        return seen.now_ms - self._since_ms if age_ms is None else age_ms


def is_chosen(gateway_id: str, seen: Observation) -> bool:
    """Whether this gateway does the work. Pure, and the same at every gateway."""
    alive = sorted(name for name, age_ms in seen.gateway_ages_ms.items() if age_ms < ALIVE_MS)
    return gateway_id in alive[:MAX_STANDBY]


class StandbyScheduler:
    """The standby scheduler of one pool. `allowed`: makes a call that only schedulers need; may raise RedisUnavailable."""

    def __init__(self, config: GatewayConfig, schedule: Schedule, allowed: Callable[[], Awaitable[object]]) -> None:
        self._config = config
        self._schedule = schedule
        self._allowed = allowed
        self._silence = SchedulerSilence(expected=config.schedulers_expected)
        self._wanted = asyncio.Event()
        self._stop = asyncio.Event()
        self._stints: set[asyncio.Task[None]] = set()
        self._refusal = ""

    def observed(self, seen: Observation | None) -> None:
        """Record an observation of the pool, None if it failed; then nothing changes."""
        silent = self._silence.after(seen) >= self._config.silent_ms
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
        """Begin the work of schedulers whenever it is needed; never returns. `close` ends it.

        A stint whose last audit records are still being written does not delay the next one.
        """
        while True:
            await self._wanted.wait()
            stop = self._stop
            stint = asyncio.create_task(self._serve(stop), name=f"scheduling {self._config.place}")
            self._stints.add(stint)
            stint.add_done_callback(self._stints.discard)
            await stop.wait()

    async def close(self) -> None:
        """Stop scheduling, once `run` has ended. Audit records that wait are written within CLOSE_S, or by another process."""
        self._stop.set()
        if self._stints:
            await asyncio.wait(self._stints, timeout=CLOSE_S)
        await end_all(self._stints)

    async def _serve(self, stop: asyncio.Event) -> None:
        config, place = self._config, self._config.place
        say = log.warning if config.schedulers_expected else log.info
        while not stop.is_set():
            try:
                await self._allowed()
                self._refusal = ""
                say("no scheduler is running: this gateway schedules", pool=place)
                await self._schedule(config.redis_url, config.pool, stop)
                log.info("this gateway no longer schedules", pool=place)
                continue
            except RedisUnavailable as error:
                self._refused(str(error))
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("scheduling in a gateway failed", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await stop.wait()

    def _refused(self, reason: str) -> None:
        if reason != self._refusal:
            log.warning("scheduling in this gateway is not possible", pool=self._config.place, reason=reason)
        self._refusal = reason
