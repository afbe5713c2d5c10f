"""Tells Redis, again and again, that this worker lives and how it is; a worker that cannot do so claims nothing.

The first beat, each that says something new at once, and each after a fault is awaited by a task. All others are pulses,
sent by a timer's callback: the answer to one must be there when the next is due.
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
"""In so many moments of a period all beats of a machine fall together: processes that wake in turn find the interpreter
in the caches, and Redis reads several in one go."""

_EARLY = 0.01  # A timer may be early by so much of a period; that is not the end of the slot before.

log = structlog.get_logger()


class Heartbeat:
    """Sends what `heartbeat` returns every `every_s` seconds, and at once when asked. `working`: the last one arrived.

    `away` is called with each beat that did not arrive after another one that did not. `free` is set but while the answers
    say that the worker is cordoned; `turned` is called when that changes.
    """

    def __init__(
        self,
        presence: Presence,
        heartbeat: Callable[[], WorkerReport],
        every_s: float,
        away: Callable[[], None],
        turned: Callable[[], None],
    ) -> None:
        self._presence = presence
        self._beat = heartbeat
        self._every_s = every_s
        self._away = away
        self._turned = turned
        self._pulse = presence.pulse(self.now, self._stands)
        self._due = asyncio.Event()
        self._beat_at = 0.0
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.working = asyncio.Event()
        self.free = asyncio.Event()
        self.free.set()

    def start(self) -> "asyncio.Task[None]":
        """Begin, with the first beat at once. Returns the task, which ends by `close` alone."""
        self._task = asyncio.create_task(self._run(), name="heartbeat")
        return self._task

    def now(self) -> None:
        """The next beat is due: something changed that others should know."""
        self._due.set()

    def fast_path_request(self) -> None:
        """Something is about to be sent to Redis: a beat that is due in half its time goes along, at no extra wake-up."""
        if time.monotonic() - self._beat_at >= self._every_s / 2 and not self._pulse.pending:
            self._tick()

    async def close(self) -> None:
        """Beat no more. A beat that is under way ends first, so that none arrives after the worker said goodbye."""
        self._stopping = True
        self._due.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._stopping:
            self._due.clear()
            await self._tell()
            self._wait()
            await self._due.wait()
        self._stop_waiting()
        if self._pulse.pending:  # On the same connection: when this has arrived, so has the pulse.
            with suppress(RedisUnavailable):
                await self._presence.worker_beat(self._beat())

    async def _tell(self) -> None:
        self._beat_at = time.monotonic()
        self._pulse.forget()
        try:
            self._stands(await self._presence.worker_beat(self._beat()))
            self._arrived()
        except RedisUnavailable:
            self._missed()
        except Exception as error:
            self._missed()
            log.exception("heartbeat failed", error=type(error).__name__)

    def _tick(self) -> None:
        """A pulse where that will do; else the task is woken."""
        try:
            sent = self._pulsed()
        except Exception as error:
            self._missed()
            log.exception("heartbeat failed", error=type(error).__name__)
            sent = False
        if sent:
            self._wait()
        else:
            self._due.set()

    def _pulsed(self) -> bool:
        if self._pulse.pending:  # A whole period without an answer.
            self._pulse.give_up()
            self._missed()
        if self._due.is_set() or not self.working.is_set() or not self._pulse.send(self._beat()):
            return False
        self._beat_at = time.monotonic()
        return True

    def _stands(self, customer_limits: CordonStatus) -> None:
        """The answer to a beat; before the first claim there was one."""
        if customer_limits == CordonStatus.UNKNOWN or (customer_limits == CordonStatus.FREE) == self.free.is_set():
            return
        if customer_limits == CordonStatus.CORDONED:
            log.warning("cordoned; nothing more is claimed")
            self.free.clear()
        else:
            log.info("uncordoned")
            self.free.set()
        self._turned()

    def _arrived(self) -> None:
        if not self.working.is_set():
            log.info("redis reached")
        self.working.set()

    def _missed(self) -> None:
        if self.working.is_set():
            log.warning("redis is away; nothing is claimed until it is back")
        else:
            self._away()
        self.working.clear()

    def _wait(self) -> None:
        self._stop_waiting()
        early_s = _EARLY * self._every_s
        beyond_s = (time.monotonic() + early_s) % (self._every_s / SLOTS) - early_s
        self._timer = asyncio.get_running_loop().call_later(self._every_s - beyond_s, self._tick)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
