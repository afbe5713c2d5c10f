"""What requests in the slots of a worker cost, and how many it serves. Pure: times are seconds of one monotonic clock.

A request pays its part of the model: the integral of 1 / running over its time in a slot. So requests that run together pay
for each moment once, whatever their lengths.
"""

import math
from collections import deque

SAMPLES = 256
"""Ended requests that the mean time and the p95 cover: enough for lengths that vary by a factor of a hundred."""

WINDOW_S = 2.0
"""The time constant of the mean number of running requests."""

RATE_WINDOW_S = 5.0
"""The time over which the served rate is measured."""


class SlotMeter:
    """Measures one worker's slots."""

    def __init__(self) -> None:
        self.running = 0
        self.started = 0
        self._virtual_s = 0.0
        self._changed_at = 0.0
        self._mean_running = 0.0
        self._lives_s: deque[float] = deque(maxlen=SAMPLES)
        self._ended_at: deque[float] = deque(maxlen=4 * SAMPLES)
        self._ended = 0
        self._p95_ms = (0, 0.0)

    def began(self, now: float) -> float:
        """A request begins. Returns the reading to pass to `ended`."""
        self._advance(now)
        self.running += 1
        self.started += 1
        return self._virtual_s

    def ended(self, now: float, reading: float, life_s: float, *, is_answered: bool) -> float:
        """A request ends after `life_s`. Returns its cost in seconds. `is_answered`: its life is a sample."""
        self._advance(now)
        self.running -= 1
        if is_answered:
            self._lives_s.append(life_s)
            self._ended_at.append(now)
            self._ended += 1
        return self._virtual_s - reading

    def mean_running(self, now: float) -> float:
        """The number of running requests, exponentially weighted."""
        self._advance(now)
        return self._mean_running

    @property
    def mean_life_ms(self) -> float:
        """The mean time of a request in a slot; 0 if none has ended."""
        return 1000 * sum(self._lives_s) / len(self._lives_s) if self._lives_s else 0.0

    @property
    def p95_life_ms(self) -> float:
        """The 95th percentile of that time; 0 if none has ended."""
        count = self._ended
        if self._lives_s and self._p95_ms[0] != count:
            ordered = sorted(self._lives_s)
            self._p95_ms = count, 1000 * ordered[math.ceil(0.95 * len(ordered)) - 1]
        return self._p95_ms[1]

    def served_rps(self, now: float) -> float:
        """Requests that ended per second, lately; 0 with fewer than two."""
        recent = [at for at in self._ended_at if at > now - RATE_WINDOW_S]
        if len(recent) < 2:
            return 0.0
        return (
            len(recent) / max(now - recent[0], 0.001)
            if len(recent) == self._ended_at.maxlen
            else len(recent) / RATE_WINDOW_S
        )

    def _advance(self, now: float) -> None:
        elapsed_s = max(0.0, now - self._changed_at)
        self._changed_at = now
        if self.running:
            self._virtual_s += elapsed_s / self.running
        self._mean_running += (self.running - self._mean_running) * (1 - math.exp(-elapsed_s / WINDOW_S))
