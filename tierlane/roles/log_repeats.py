"""Aggregates repeated log lines: a fault that repeats a thousand times a second is one line a second with a count.

The first line of an event is written at once. Later ones are counted, and the last of each second is written with the
number of lines that it replaces, as `repeated`. Lines are the same event if level, event and texts are equal; numbers and
ids may differ. Memory is bounded: beyond MAX_EVENTS different events in a second, all lines of one level and event count
as the same.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog

EVERY_S = 1.0
MAX_EVENTS = 256
PER_REQUEST = frozenset({"request"})
"""Events whose lines are a record of their own (TIERLANE_REQUEST_LOG), never aggregated."""
_VARYING = frozenset({"id", "batch", "request_id", "trace_id", "peer", "timestamp"})

Line = MutableMapping[str, Any]
Render = Callable[[Any, str, Line], Any]


@dataclass(slots=True)
class _Repeats:
    until: float
    """The time at which the count is written."""
    count: int = 0
    last: tuple[Any, str, Line] | None = None


class RepeatFilter:
    """The last processor of structlog: renders a line with `render`, or drops it and counts it. `clock`: seconds."""

    def __init__(self, render: Render, clock: Callable[[], float] = time.monotonic) -> None:
        self._render = render
        self._clock = clock
        self._events: dict[tuple[Any, ...], _Repeats] = {}
        self._timed = False
        self._lock = threading.Lock()  # A few lines come from threads.

    def __call__(self, logger: Any, method: str, line: Line) -> Any:
        if line.get("event") in PER_REQUEST:
            return self._render(logger, method, line)
        now = self._clock()
        self.write_counts()
        with self._lock:
            texts = ((name, value) for name, value in line.items() if isinstance(value, str) and name not in _VARYING)
            key: tuple[Any, ...] = (method, *texts)
            if key not in self._events and len(self._events) >= MAX_EVENTS:
                key = method, line.get("event")
            repeats = self._events.get(key)
            if repeats is None:
                self._events[key] = _Repeats(now + EVERY_S)
                return self._render(logger, method, line)
            repeats.count += 1
            repeats.last = logger, method, line
        self._start_timer()
        raise structlog.DropEvent

    def write_counts(self, *, everything: bool = False) -> None:
        """Write the counts whose second is over; `everything`: all of them, because the process ends."""
        now = self._clock()
        with self._lock:
            due = [(key, each) for key, each in self._events.items() if everything or each.until <= now]
            for key, repeats in due:
                if repeats.last is None:
                    del self._events[key]
                    continue
                logger, method, line = repeats.last
                if repeats.count > 1:
                    line["repeated"] = repeats.count
                getattr(logger, method)(self._render(logger, method, line))
                self._events[key] = _Repeats(now + EVERY_S)  # The next lines are counted at once.

    def close(self) -> None:
        """Write all counts at the end of the process, if its output still exists."""
        with contextlib.suppress(OSError, ValueError):
            self.write_counts(everything=True)

    def _start_timer(self) -> None:
        """One timer at a time, only while lines are counted. Without a loop, the next line or the end writes the counts."""
        if self._timed:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._timed = True
        loop.call_later(EVERY_S, self._timer)

    def _timer(self) -> None:
        self._timed = False
        self.write_counts()
        with self._lock:
            counting = any(each.count for each in self._events.values())
        if counting:
            self._start_timer()
