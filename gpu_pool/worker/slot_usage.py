"""The use of a worker's slots: how many requests ran, how long each took, and its part of the engine. No clock, no I/O.

Three integrals over time are kept: of the number of running requests n, of 1 while any runs, and of 1/n. The difference of
the last one over the life of a request is its part of the engine. Divided by the requests that ended, the differences of the
others over the last requests are the mean time in a slot (Little's law, so that running requests count as well, and a change
of speed is seen before the first request has ended at the new one) and the mean cost.
"""

from collections import deque
from typing import NamedTuple

LEAST_S = 3.0
"""The means are over at least this time,"""
LEAST_ENDED, MOST_ENDED = 16, 1024
"""and so many requests, one for each slot if that is more,"""
ERROR = 0.15
"""and as many as the mean needs for this standard error: nine hundred of 5 and 2,000 tokens, a few of equal ones."""
RECENT_S = 2.0


class _Mark(NamedTuple):
    """The integrals at a time. `life_s`: of the request that ended then."""

    at_s: float
    running_s: float
    busy_s: float
    life_s: float = 0.0


class SlotStart(NamedTuple):
    """The start of a request: its time, and the integral of 1/n."""

    at_s: float
    part_s: float


class SlotUsage:
    """Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.running = 0
        self._now: float | None = None
        self._running_s = self._busy_s = self._part_s = 0.0
        self._sum_s = self._squares = 0.0  # Of the lives in `_ended`, but the first.
        self._ended: deque[_Mark] = deque()  # The ends of the last requests, behind the start of the window.
        self._recent: deque[_Mark] = deque()

    def start(self, now: float) -> SlotStart:
        """A request begins. Returns what `end` needs."""
        self._advance(now)
        self.running += 1
        return SlotStart(now, self._part_s)

    def end(self, now: float, start: SlotStart, slots: int) -> float:
        """A request ends. Returns its part of the engine in ms."""
        self._advance(now)
        self.running -= 1
        life_s = max(0.0, now - start.at_s)
        self._ended.append(_Mark(now, self._running_s, self._busy_s, life_s))
        self._sum_s += life_s
        self._squares += life_s**2
        # The requests whose mean life has the standard error ERROR; half as many more, because the tail is seen late.
        ended = len(self._ended) - 1
        mean = self._sum_s / ended
        variance = self._squares / ended - mean * mean
        needed = max(LEAST_ENDED, slots, 1.5 * variance / (ERROR * mean) ** 2 if mean > 0 else 0.0)
        while (len(self._ended) > needed + 1 and self._ended[1].at_s < now - LEAST_S) or len(self._ended) > MOST_ENDED:
            self._ended.popleft()
            self._sum_s -= self._ended[0].life_s
            self._squares -= self._ended[0].life_s ** 2
        return (self._part_s - start.part_s) * 1000

    def leave(self, now: float) -> None:
        """A request ends without an answer: its time is no sample."""
        self._advance(now)
        self.running -= 1

    def mean_ms(self, now: float) -> float:
        """The mean time of a request in a slot; 0 until one has ended."""
        self._advance(now)
        ended = len(self._ended) - 1
        return 1000 * (self._running_s - self._ended[0].running_s) / ended if ended else 0.0

    def mean_running(self, now: float) -> float:
        """The mean number of running requests while any ran; 0 until one has ended."""
        self._advance(now)
        busy_s = self._busy_s - self._ended[0].busy_s
        return (self._running_s - self._ended[0].running_s) / busy_s if len(self._ended) > 1 and busy_s > 0 else 0.0

    def recent_running(self, now: float) -> float:
        """The mean number of running requests of the last two seconds."""
        self._advance(now)
        self._recent.append(_Mark(now, self._running_s, self._busy_s))
        while len(self._recent) > 2 and self._recent[1].at_s <= now - RECENT_S:
            self._recent.popleft()
        first = self._recent[0]
        return (self._running_s - first.running_s) / (now - first.at_s) if now > first.at_s else float(self.running)

    def served_rps(self) -> float:
        """Requests/s that ended; 0 until one has."""
        if len(self._ended) < 2:
            return 0.0
        span_s = self._ended[-1].at_s - self._ended[0].at_s
        return (len(self._ended) - 1) / span_s if span_s > 0 else 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which any request ran."""
        return self._busy_s

    def _advance(self, now: float) -> None:
        if self._now is None:
            self._now = now
            self._ended.append(_Mark(now, 0.0, 0.0))
            self._recent.append(_Mark(now, 0.0, 0.0))
        elapsed_s = max(0.0, now - self._now)
        self._now = max(self._now, now)
        if self.running:
            self._running_s += elapsed_s * self.running
            self._busy_s += elapsed_s
            self._part_s += elapsed_s / self.running
