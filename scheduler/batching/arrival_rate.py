"""The rate at which requests arrive in a pool."""

import math


class ArrivalRate:
    """An exponentially weighted moving average over irregular intervals."""

    def __init__(self, half_life_s: float = 0.25) -> None:
        self._decay = math.log(2) / half_life_s
        self._rate = 0.0
        self._pending = 0
        self._seen_at: float | None = None

    def record(self, count: int, now_s: float) -> None:
        """`count` requests arrived since the last call."""
        if self._seen_at is None:
            self._seen_at, self._pending = now_s, 0
            return
        self._pending += count
        elapsed = now_s - self._seen_at
        if elapsed <= 0:
            return
        keep = math.exp(-self._decay * elapsed)
        self._rate = self._rate * keep + self._pending / elapsed * (1 - keep)
        self._seen_at, self._pending = now_s, 0

    def per_second(self, now_s: float) -> float:
        """The average at `now_s`: the time since the last record counts as without arrivals."""
        if self._seen_at is None:
            return 0.0
        return self._rate * math.exp(-self._decay * max(0.0, now_s - self._seen_at))
