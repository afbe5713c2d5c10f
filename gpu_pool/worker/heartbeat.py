"""Sends the worker's heartbeat to Redis; a worker whose heartbeats fail claims nothing.

The first heartbeat, each one with a change, and each one after a failure are sent and awaited by a task. All others are
sent by a timer callback without a task; their reply must be there when the next one is due.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from scheduler.errors import RedisUnavailable
from scheduler.protocol.pool_view import WorkerReport
from scheduler.protocol.presence import CordonStatus, Presence

SLOTS = 10
"""All heartbeats of a machine are aligned to this many moments of a period: processes that wake one after another find
the interpreter in the CPU caches, and Redis reads several requests at once.
"""

_EARLY = 0.01  # Timers may fire early by this share of a period; then the slot has not passed.

log = structlog.get_logger()


class Heartbeat:
    """Sends what `heartbeat` returns every `every_s` seconds, and at once after `now`. `working`: the last one
    succeeded.

    `on_outage` is called for each failure after another failure. `free` is cleared while replies say that the worker is
    cordoned; `on_cordon_change` is called when that changes.
    """

    def __init__(
        self,
        presence: Presence,
        heartbeat: Callable[[], WorkerReport],
        every_s: float,
        on_outage: Callable[[], None],
        on_cordon_change: Callable[[], None],
    ) -> None:
        self._presence = presence
        self._beat = heartbeat
        self._every_s = every_s
        self._on_outage = on_outage
        self._on_cordon_change = on_cordon_change
        self._async_heartbeat = presence.async_heartbeat(self.now, self._cordon_status)
        self._due = asyncio.Event()
        self._beat_at = 0.0
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.working = asyncio.Event()
        self.free = asyncio.Event()
        self.free.set()

    def start(self) -> "asyncio.Task[None]":
        """Start, with the first heartbeat at once. Returns the task, which ends only by `close`."""
        self._task = asyncio.create_task(self._run(), name="heartbeat")
        return self._task

    def now(self) -> None:
        """Send the next heartbeat now, since something changed."""
        self._due.set()

    def fast_path_request(self) -> None:
        """A request to Redis follows: send a heartbeat that is due within half its period along with it."""
        if time.monotonic() - self._beat_at >= self._every_s / 2 and not self._async_heartbeat.pending:
            self._tick()

    async def close(self) -> None:
        """Stop. A heartbeat in progress ends first, so that none arrives after the worker was deregistered."""
        self._stopping = True
        self._due.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._stopping:
            self._due.clear()
            await self._send_awaited()
            self._schedule()
            await self._due.wait()
        self._cancel_timer()
        if self._async_heartbeat.pending:  # Same connection: when this one has arrived, so has the pending one.
            with suppress(RedisUnavailable):
                await self._presence.worker_beat(self._beat())

    async def _send_awaited(self) -> None:
        self._beat_at = time.monotonic()
        self._async_heartbeat.forget()
        try:
            self._cordon_status(await self._presence.worker_beat(self._beat()))
            self._succeeded()
        except RedisUnavailable:
            self._failed()
        except Exception as error:
            self._failed()
            log.exception("heartbeat failed", error=type(error).__name__)

    def _tick(self) -> None:
        """Send without a task if possible, else wake the task."""
        try:
            sent = self._send_without_waiting()
        except Exception as error:
            self._failed()
            log.exception("heartbeat failed", error=type(error).__name__)
            sent = False
        if sent:
            self._schedule()
        else:
            self._due.set()

    def _send_without_waiting(self) -> bool:
        if self._async_heartbeat.pending:  # No reply for a whole period.
            self._async_heartbeat.give_up()
            self._failed()
        if self._due.is_set() or not self.working.is_set() or not self._async_heartbeat.send(self._beat()):
            return False
        self._beat_at = time.monotonic()
        return True

    def _cordon_status(self, status: CordonStatus) -> None:
        """The cordon status in a reply."""
        if status == CordonStatus.UNKNOWN or (status == CordonStatus.FREE) == self.free.is_set():
            return
        if status == CordonStatus.CORDONED:
            log.warning("worker cordoned; it claims nothing more")
            self.free.clear()
        else:
            log.info("worker uncordoned")
            self.free.set()
        self._on_cordon_change()

    def _succeeded(self) -> None:
        if not self.working.is_set():
            log.info("redis connected")
        self.working.set()

    def _failed(self) -> None:
        if self.working.is_set():
            log.warning("redis unavailable; nothing is claimed until it responds")
        else:
            self._on_outage()
        self.working.clear()

    def _schedule(self) -> None:
        self._cancel_timer()
        early_s = _EARLY * self._every_s
        beyond_s = (time.monotonic() + early_s) % (self._every_s / SLOTS) - early_s
        self._timer = asyncio.get_running_loop().call_later(self._every_s - beyond_s, self._tick)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
