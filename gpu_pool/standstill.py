"""Knows whether this process stood still lately (SIGSTOP, a frozen machine), after which nothing says how old a message is.

A direct batch says how many milliseconds its requests have left, counted from when it was sent. One that lay in the
socket while the worker stood still may be long overdue. It ticks only while somebody is connected: a batch comes over a
connection that was welcomed before, so there were ticks before the batch was sent.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICK_S = 0.05
GAP_S = 0.25
"""A tick that is late by so much was a standstill; a busy loop is late by less."""
DOUBT_S = 0.1
"""What was in the socket is read within so long of going on."""


class Standstill:
    """`in_doubt()` while it stands still or has just gone on. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen_at = clock()
        self._doubt_until = 0.0
        self._watched = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tick as long as this lasts; several may overlap."""
        if self._timer is None:
            self._seen_at = self._clock()
            self._tick_on()
        self._watched += 1
        try:
            yield
        finally:
            self._watched -= 1
            if not self._watched and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _tick_on(self) -> None:
        self.tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick_on)

    def tick(self) -> None:
        """Note that the process runs now."""
        now = self._clock()
        if now - self._seen_at > GAP_S:
            self._doubt_until = now + DOUBT_S
        self._seen_at = now

    def in_doubt(self) -> bool:
        """Whether what is read now may be older than it looks."""
        now = self._clock()
        return now < self._doubt_until or now - self._seen_at > GAP_S
