"""How long batches take: arithmetic over measured (size, milliseconds) pairs. No clock, no I/O.

Sizes within a factor of two share a class (1, 2-3, 4-7, ...). A class keeps its last samples for the percentiles and an
exponentially weighted mean for the fit. The fit `ms = a * n + b` is least squares over the classes' means, each
weighted by its samples up to a limit, so that full batches are not forgotten in a quiet hour.

A model may become slower or faster. For sizes that still run this is detected by three samples in a row (six if times
always vary) that all differ more than usual, slower ones over two seconds of running: they replace the mean. A size
that no longer runs is forgotten once it contradicts one that does: a larger batch takes no less time, and at most a
little more per item.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

SAMPLES_KEPT = 128
SAMPLES_TRUSTED = 20
"""With fewer samples there is no percentile."""
_MEAN_OVER_MS = 3000.0
"""The mean covers about this much running time,"""
_NEWEST_WEIGHT = 0.05
"""but at least about twenty samples."""
_STEP_SAMPLES = 3
_VARYING = 0.1
"""From this relative deviation on twice as many samples are needed, since three in a row may be random,"""
_NO_CHANCE_MS = 3000.0
"""unless they span this much running time."""
_SLOWER_MS = 2000.0
"""Slow batches must have run this long: another process on the CPU slows short ones. Nothing makes them faster."""
_LEAST_STEP = 0.3  # Relative to the mean; and at least this many times the usual deviation:
_UNUSUAL = 3.0
_STALE_AFTER = 20  # Batches of other sizes since the last one of this.
_CONTRADICTS = 1.5  # A small batch that takes this many times as long as a larger one is no noise.
_SUPERLINEAR = 2.0  # An item of a large batch may take this many times as long as one of a small one (caches, memory).


@dataclass
class _SizeClass:
    samples: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)  # The same samples, sorted.
    count: int = 0
    mean_size: float = 0.0
    mean_ms: float = 0.0
    deviation: float = 0.0  # Mean of |ms / mean - 1|.
    unusual: list[float] = field(default_factory=list)  # The newest samples, all unusual in the same direction.
    recorded_at: int = 0  # Number of the batch.

    def record(self, size: int, ms: float) -> None:
        if self._is_step(ms):
            self.samples.clear()
            self.ordered.clear()
            self.count, self.deviation = 0, 0.0
            for earlier in self.unusual[:-1]:
                self._add(size, earlier)
            self.unusual.clear()
        self._add(size, ms)

    def _is_step(self, ms: float) -> bool:
        """Whether the last samples, all unusual in the same direction, show that the duration has changed."""
        if self.count < _STEP_SAMPLES or self.mean_ms <= 0:
            return False
        off = max(ms, 0.001) / self.mean_ms
        limit = 1 + max(_LEAST_STEP, _UNUSUAL * self.deviation)
        if 1 / limit <= off <= limit:
            self.unusual.clear()
            return False
        if self.unusual and (self.unusual[-1] > self.mean_ms) != (ms > self.mean_ms):
            self.unusual.clear()
        self.unusual.append(ms)
        seen, ran_ms = len(self.unusual), sum(self.unusual)
        by_chance = self.deviation >= _VARYING and seen < 2 * _STEP_SAMPLES and ran_ms < _NO_CHANCE_MS
        return seen >= _STEP_SAMPLES and not by_chance and (ms < self.mean_ms or ran_ms >= _SLOWER_MS)

    def _add(self, size: int, ms: float) -> None:
        self.samples.append(ms)
        insort(self.ordered, ms)
        if len(self.samples) > SAMPLES_KEPT:
            del self.ordered[bisect_left(self.ordered, self.samples.popleft())]
        self.count += 1
        # By the mean: a slow sample must not also get a larger weight.
        weight = max(1 / self.count, min(_NEWEST_WEIGHT, self.mean_ms / _MEAN_OVER_MS))
        if self.count > 1:
            off = abs(ms / max(self.mean_ms, 0.001) - 1)
            # A step must not raise the deviation that it is compared with; noise must.
            self.deviation += weight * ((min(off, _LEAST_STEP) if self.unusual else off) - self.deviation)
        self.mean_size += weight * (size - self.mean_size)
        self.mean_ms += weight * (ms - self.mean_ms)


class ServiceTime:
    """The measured service time of one worker's model."""

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}
        self._batches = 0

    def record(self, size: int, ms: float) -> None:
        """A batch of `size` items took `ms` milliseconds."""
        self._batches += 1
        known = self._classes.setdefault(size.bit_length(), _SizeClass())
        known.record(size, ms)
        known.recorded_at = self._batches
        if known.count < _STEP_SAMPLES:
            return
        # Drop sizes that did not run lately and whose times are impossible given this one.
        for bits, stale in list(self._classes.items()):
            if self._ran_lately(stale):
                continue
            if stale.mean_size < known.mean_size:
                possible = stale.mean_ms <= known.mean_ms * _CONTRADICTS
            else:
                most_ms = known.mean_ms * stale.mean_size / known.mean_size * _SUPERLINEAR
                possible = known.mean_ms / _CONTRADICTS <= stale.mean_ms <= most_ms
            if not possible:
                del self._classes[bits]

    def _ran_lately(self, known: _SizeClass) -> bool:
        return self._batches - known.recorded_at < _STALE_AFTER

    def forget(self, size: int) -> None:
        """Drop the measurements of this size, since they stopped a batch and stopped batches are not measured.

        Otherwise a model that became slower would be killed at its old cap, or rejected for its new p95, forever.
        """
        self._classes.pop(size.bit_length(), None)

    def forget_over(self, size: int) -> None:
        """Drop the measurements of larger batches: they run in another way from now on."""
        self._classes = {bits: known for bits, known in self._classes.items() if known.mean_size <= size}

    def p95(self, size: int) -> float | None:
        """Milliseconds below which 95 of 100 batches of about this size stay; None while there are too few samples."""
        return self._percentile(size, 0.95)

    def p99(self, size: int) -> float | None:
        """Milliseconds below which 99 of 100 batches of about this size stay; None while there are too few samples."""
        return self._percentile(size, 0.99)

    def needed_ms(self, size: int) -> float:
        """The time that a run of this size must have: the p95, or 0 while there are too few samples."""
        return self.p95(size) or 0.0

    def typical_p95_ms(self, size: int) -> float:
        """The reported p95: the percentile, else the fit, else 0."""
        return self.p95(size) or self.predicted_ms(size)

    def predicted_ms(self, size: int) -> float:
        """The fit at this size; 0 while nothing was measured."""
        slope, base = self.fit()
        return slope * size + base

    def rate_at(self, max_batch: int) -> float:
        """Requests/s with full batches; 0 while no batch of at least half that size was measured.

        A fit over single requests does not predict full batches, and limits must not be based on it.
        """
        if 2 * self.seen_batch < max_batch:
            return 0.0
        return 1000 * max_batch / max(self.predicted_ms(max_batch), 0.001)

    @property
    def seen_batch(self) -> float:
        """Mean size of the largest measured class; 0 if nothing was measured."""
        return max((c.mean_size for c in self._classes.values()), default=0.0)

    @property
    def fresh_batch(self) -> float:
        """The same for batches that ran lately."""
        return max((c.mean_size for c in self._classes.values() if self._ran_lately(c)), default=0.0)

    def _percentile(self, size: int, share: float) -> float | None:
        """By nearest rank."""
        known = self._classes.get(size.bit_length())
        if known is None or len(known.samples) < SAMPLES_TRUSTED:
            return None
        return known.ordered[math.ceil(share * len(known.ordered)) - 1]

    def fit(self) -> tuple[float, float]:
        """Slope and base in ms, both at least 0."""
        rows = [(min(c.count, SAMPLES_TRUSTED), c.mean_size, c.mean_ms) for c in self._classes.values()]
        if not rows:
            return 0.0, 0.0
        weight = sum(w for w, _, _ in rows)
        mean_n = sum(w * n for w, n, _ in rows) / weight
        mean_t = sum(w * t for w, _, t in rows) / weight
        spread = sum(w * (n - mean_n) ** 2 for w, n, _ in rows)
        slope = sum(w * (n - mean_n) * (t - mean_t) for w, n, t in rows) / spread if spread else 0.0
        slope = min(max(slope, 0.0), mean_t / mean_n)
        return slope, mean_t - slope * mean_n


def cap_ms(p99_ms: float | None, gpu_timeout_ms: float, floor_ms: float = 500.0) -> float:
    """How long a batch may run without progress: 4 x p99, at least the floor, at most the timeout."""
    if p99_ms is None:
        return gpu_timeout_ms
    return min(gpu_timeout_ms, max(4 * p99_ms, floor_ms))
