"""Tells Redis, again and again, that this worker lives and how it is; a worker that cannot do so claims nothing."""

import asyncio
import time
from collections.abc import Callable

import structlog

from scheduler.errors import RedisUnavailable
from scheduler.observation import WorkerBeat
from scheduler.presence import Presence

log = structlog.get_logger()


class Heartbeat:
    """Sends what `beat` returns at least every `every_s` seconds, and at once when asked. `working`: the last one arrived."""

    def __init__(self, presence: Presence, beat: Callable[[], WorkerBeat], every_s: float) -> None:
        self._presence = presence
        self._beat = beat
        self._every_s = every_s
        self._due = asyncio.Event()
        self._beat_at = 0.0
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self.working = asyncio.Event()

    def start(self) -> None:
        """Begin, with the first beat at once."""
        self._task = asyncio.create_task(self._run(), name="heartbeat")

    def now(self) -> None:
        """The next beat is due: something changed that others should know."""
        self._due.set()

    def ride(self) -> None:
        """Something is about to be sent to Redis: a beat that is due in half its time goes along, at no extra wake-up."""
        if time.monotonic() - self._beat_at >= self._every_s / 2:
            self._due.set()

    async def close(self) -> None:
        """Beat no more. A beat that is under way ends first, so that none arrives after the worker said goodbye."""
        self._stopping = True
        self._due.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._stopping:
            self._due.clear()
            self._beat_at = time.monotonic()
            try:
                await self._presence.worker_beat(self._beat())
                self._arrived()
            except RedisUnavailable:
                self._missed()
            except Exception as error:
                self._missed()
                log.exception("heartbeat failed", error=type(error).__name__)
            await self._pause()

    def _arrived(self) -> None:
        if not self.working.is_set():
            log.info("redis reached")
        self.working.set()

    def _missed(self) -> None:
        if self.working.is_set():
            log.warning("redis is away; nothing is claimed until it is back")
        self.working.clear()

    async def _pause(self) -> None:
        timer = asyncio.get_running_loop().call_later(self._every_s, self._due.set)
        await self._due.wait()
        timer.cancel()
