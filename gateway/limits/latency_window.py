"""Response times of the last ten seconds, as counts in logarithmic buckets."""

import math
from bisect import bisect_left
from itertools import accumulate

LATENCY_SLOTS = 10
LATENCY_SLOT_S = 1.0
_BUCKETS_PER_DOUBLING = 6  # A response time is known to 12 %.
_BUCKETS = 14 * _BUCKETS_PER_DOUBLING  # Up to 16 s.


class LatencyWindow:
    """Counts of response times, one row of buckets a second."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = [[0] * _BUCKETS for _ in range(LATENCY_SLOTS)]
        self._slot = 0
        self._last = -LATENCY_SLOTS  # The slot of the last response.

    def add(self, latency_ms: float, now: float) -> None:
        """Count one response; `now` is monotonic seconds."""
        if int(now / LATENCY_SLOT_S) != self._slot:
            self._turn(now)
        self._last = self._slot
        bucket = int(math.log2(latency_ms) * _BUCKETS_PER_DOUBLING) if latency_ms > 1.0 else 0
        self._rows[self._slot % LATENCY_SLOTS][bucket if bucket < _BUCKETS else _BUCKETS - 1] += 1

    def percentiles_ms(self, shares: tuple[float, ...], now: float) -> list[float]:
        """The percentiles `shares` (0..1, ascending) in ms, each rounded up to its bucket's end; 0 without a response."""
        self._turn(now)
        if self._slot - self._last >= LATENCY_SLOTS:
            return [0.0] * len(shares)
        counts = [sum(column) for column in zip(*self._rows, strict=True)]
        ranks = [math.ceil(share * sum(counts)) for share in shares]
        reached = list(accumulate(counts))
        return [float(round(2 ** ((bisect_left(reached, rank) + 1) / _BUCKETS_PER_DOUBLING), 1)) for rank in ranks]

    def _turn(self, now: float) -> None:
        slot = int(now / LATENCY_SLOT_S)
        for passed in range(max(self._slot + 1, slot - LATENCY_SLOTS + 1), slot + 1):
            self._rows[passed % LATENCY_SLOTS] = [0] * _BUCKETS
        self._slot = max(self._slot, slot)
