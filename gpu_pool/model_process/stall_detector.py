"""Detects that this process was stalled (SIGSTOP, a frozen machine), so that data read now may be older than it looks.

It serves direct batches, which say how many milliseconds their requests have left, counted from when they were sent: one
that was in the socket while the worker was stalled may be long overdue. It ticks only while a gateway is connected.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICK_S = 0.08
"""Each tick is a wake-up of an idle worker. A stall is noticed from GAP_S on, whatever the ticks are."""
GAP_S = 0.25
"""A longer time between two ticks was a stall; a busy event loop is late by less."""
DOUBT_S = 0.1
"""Frames in the socket are read within this time after a stall."""


class StallDetector:
    """`in_doubt()` is True during a stall and just after it. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen_at = clock()
        self._doubt_until = 0.0
        self._watched = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tick inside this context; contexts may overlap."""
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
        """Record that the process runs now."""
        now = self._clock()
        if now - self._seen_at > GAP_S:
            self._doubt_until = now + DOUBT_S
        self._seen_at = now

    def in_doubt(self) -> bool:
        """Whether data that is read now may be older than it looks."""
        now = self._clock()
        return now < self._doubt_until or now - self._seen_at > GAP_S
