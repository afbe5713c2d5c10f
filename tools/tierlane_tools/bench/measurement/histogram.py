"""Histograms of times.

Buckets are a geometric series, 1 % apart, and a quantile is the geometric middle of its bucket, so it is off by at most
half a per cent; memory does not grow with the number of samples. Mean, deviation, least and largest are exact.
"""

import math
from collections.abc import Iterable

LOWEST_S = 1e-6
HIGHEST_S = 3600.0
BUCKET_RATIO = 1.01

_PER_LOG = 1 / math.log(BUCKET_RATIO)
_PER_LOWEST = 1 / LOWEST_S
_LAST = int(math.log(HIGHEST_S * _PER_LOWEST) * _PER_LOG)


class Histogram:
    """Counts times in seconds from a microsecond to an hour; what is outside counts at the edge."""

    __slots__ = ("count", "counts", "largest", "least", "square_sum", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (_LAST + 1)
        self.sum = 0.0
        self.square_sum = 0.0
        self.count = 0
        self.least = math.inf
        self.largest = 0.0

    def record(self, seconds: float) -> None:
        """Count one time; called once a request, so everything that can wait is left to the reader."""
        bucket = int(math.log(seconds * _PER_LOWEST) * _PER_LOG) if seconds > LOWEST_S else 0
        self.counts[bucket if bucket < _LAST else _LAST] += 1  # noqa: FURB136  # min() costs a call on the hot path
        self.count += 1
        self.sum += seconds
        self.square_sum += seconds * seconds
        if seconds > self.largest:  # noqa: PLR1730  # as above
            self.largest = seconds
        if seconds < self.least:  # noqa: PLR1730  # as above
            self.least = seconds

    def quantile(self, share: float) -> float | None:
        """The time that `share` (0..1) of the samples do not exceed, by nearest rank; None without samples."""
        if not self.count:
            return None
        rank = max(1, math.ceil(share * self.count))
        if rank >= self.count:
            return self.largest
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen >= rank:
                return self._bounded(bucket)
        raise RuntimeError("This is a bug: the buckets hold fewer samples than were counted.")

    def _bounded(self, bucket: int) -> float:
        middle = LOWEST_S * math.exp((bucket + 0.5) / _PER_LOG)
        return min(max(middle, self.least), self.largest)

    def steps(self, width: float = 1.03) -> list[tuple[float, int]]:
        """The samples in fewer buckets, each about `width` times the one before: (upper end in seconds, count)."""
        merge = max(1, round(math.log(width) * _PER_LOG))
        parts = [(start, sum(self.counts[start : start + merge])) for start in range(0, _LAST + 1, merge)]
        return [(LOWEST_S * math.exp((start + merge) / _PER_LOG), count) for start, count in parts if count]

    def since(self, before: "Histogram") -> "Histogram":
        """What was counted after `before`, which is this one at an earlier time; largest and least as buckets tell."""
        new = Histogram()
        new.counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        new.sum, new.square_sum = self.sum - before.sum, self.square_sum - before.square_sum
        new.count = self.count - before.count
        used = [bucket for bucket, count in enumerate(new.counts) if count]
        if used:
            new.least, new.largest = self._bounded(used[0]), self._bounded(used[-1])
        return new

    @property
    def mean(self) -> float | None:
        """The mean in seconds; None without samples."""
        return self.sum / self.count if self.count else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation in seconds; None without samples."""
        if not self.count:
            return None
        mean = self.sum / self.count
        return math.sqrt(max(0.0, self.square_sum / self.count - mean * mean))

    @classmethod
    def merged(cls, parts: Iterable["Histogram"]) -> "Histogram":
        """One histogram with the samples of all."""
        whole = cls()
        for part in parts:
            whole.counts = [mine + theirs for mine, theirs in zip(whole.counts, part.counts, strict=True)]
            whole.sum += part.sum
            whole.square_sum += part.square_sum
            whole.count += part.count
            whole.least = min(whole.least, part.least)
            whole.largest = max(whole.largest, part.largest)
        return whole
