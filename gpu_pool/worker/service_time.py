"""How long batches take: pure arithmetic over measured (size, milliseconds) pairs. No clock, no I/O.

Sizes within a factor of two share a class (1, 2-3, 4-7, ...). A class keeps its last samples for the percentiles and an
exponentially weighted mean for the fit. The fit `ms = a * n + b` is least squares over the classes' means, each
weighted by its samples up to a limit: so what was learnt about full batches is not forgotten in a quiet hour.

A model may become slower or faster. In the sizes that still run it is noticed by three samples in a row (six where the times
always vary) that are all off by more than usual, slower ones over two seconds of running: they replace the mean. A size that does
not run any more is forgotten once it contradicts one that runs: a larger batch takes no less time, and hardly more than as
many times longer as it is larger.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

SAMPLES_KEPT = 128
SAMPLES_TRUSTED = 20
"""Under so many samples a percentile says nothing: a class that has fewer is not held to one."""
_MEAN_OVER_MS = 3000.0
"""The mean is that of about so long a time of running,"""
_NEWEST_WEIGHT = 0.05
"""but of no fewer than about twenty samples."""
_STEP_SAMPLES = 3
_VARYING = 0.1
"""From this usual deviation on twice as many samples are needed, since three in a row come by chance,"""
_NO_CHANCE_MS = 3000.0
"""but not of long batches, for which so many would take too long."""
_SLOWER_MS = 2000.0
"""So long must slow batches have run: short ones are slow together whenever something else has the processor. Nothing makes
them faster by chance."""
_LEAST_STEP = 0.3  # Relative to the mean; and at least this many times the usual deviation:
_UNUSUAL = 3.0
_STALE_AFTER = 20  # Batches of other sizes since the last one of this.
_CONTRADICTS = 1.5  # A small batch that takes so many times what a larger one does is no noise.
_SUPERLINEAR = 2.0  # An item of a large batch may take so many times what one of a small batch does: caches, memory.


@dataclass
class _SizeClass:
    samples: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)  # The same: percentiles are asked for with every batch.
    count: int = 0
    mean_size: float = 0.0
    mean_ms: float = 0.0
    deviation: float = 0.0  # Mean of |ms / mean - 1|.
    unusual: list[float] = field(default_factory=list)  # The newest samples, all off on one side.
    recorded_at: int = 0  # In batches of the model.

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
        """Whether the last samples, all off on one side, show that the model takes another time now."""
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
        # By the mean, not by this sample: one that counts for more the longer it took would count twice.
        weight = max(1 / self.count, min(_NEWEST_WEIGHT, self.mean_ms / _MEAN_OVER_MS))
        if self.count > 1:
            off = abs(ms / max(self.mean_ms, 0.001) - 1)
            # A step must not hide itself, and noise that is no step must count.
            self.deviation += weight * ((min(off, _LEAST_STEP) if self.unusual else off) - self.deviation)
        self.mean_size += weight * (size - self.mean_size)
        self.mean_ms += weight * (ms - self.mean_ms)

    def percentile(self, share: float) -> float | None:
        """By nearest rank."""
        if len(self.samples) < SAMPLES_TRUSTED:
            return None
        return self.ordered[math.ceil(share * len(self.ordered)) - 1]


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
        if known.count >= _STEP_SAMPLES:
            self._forget_contradicted(known)

    def _forget_contradicted(self, fresh: _SizeClass) -> None:
        """Drop the sizes that did not run lately and whose times cannot be true any more, by the fresh one's."""
        for bits, stale in list(self._classes.items()):
            if self._ran_lately(stale):
                continue
            if stale.mean_size < fresh.mean_size:
                possible = stale.mean_ms <= fresh.mean_ms * _CONTRADICTS
            else:
                most_ms = fresh.mean_ms * stale.mean_size / fresh.mean_size * _SUPERLINEAR
                possible = fresh.mean_ms / _CONTRADICTS <= stale.mean_ms <= most_ms
            if not possible:
                del self._classes[bits]

    def _ran_lately(self, known: _SizeClass) -> bool:
        return self._batches - known.recorded_at < _STALE_AFTER

    def forget(self, size: int) -> None:
        """Drop what is known of this size, since it stopped a batch, and nothing that is stopped is measured.

        Else a model that became slower would be killed at its old cap, or refused for its new p95, for ever.
        """
        self._classes.pop(size.bit_length(), None)

    def forget_over(self, size: int) -> None:
        """Drop what is known of batches larger than this: they run in another way from now on."""
        self._classes = {bits: known for bits, known in self._classes.items() if known.mean_size <= size}

    def p95(self, size: int) -> float | None:
        """Milliseconds that 95 of 100 batches of about this size stay under; None while too few were seen."""
        return self._percentile(size, 0.95)

    def p99(self, size: int) -> float | None:
        """Milliseconds that 99 of 100 batches of about this size stay under; None while too few were seen."""
        return self._percentile(size, 0.99)

    def needed_ms(self, size: int) -> float:
        """What a run of this size must be given: the p95; 0 while too few were seen, so that they are tried."""
        return self.p95(size) or 0.0

    def typical_p95_ms(self, size: int) -> float:
        """What is told of this size: the p95, else the fit, else 0 where nothing was measured."""
        return self.p95(size) or self.predicted_ms(size)

    def predicted_ms(self, size: int) -> float:
        """The fit at this size; 0 while nothing was measured."""
        slope, base = self.fit()
        return slope * size + base

    def rate_at(self, max_batch: int) -> float:
        """Requests a second with full batches; 0 while no batch of at least half that size was measured.

        A fit over single requests says little about full batches, and a limit must not be built on it.
        """
        if 2 * self.seen_batch < max_batch:
            return 0.0
        return 1000 * max_batch / max(self.predicted_ms(max_batch), 0.001)

    @property
    def seen_batch(self) -> float:
        """The largest batches that were measured: the mean size of their class; 0 while none was."""
        return max((c.mean_size for c in self._classes.values()), default=0.0)

    @property
    def fresh_batch(self) -> float:
        """The same of batches that ran lately."""
        return max((c.mean_size for c in self._classes.values() if self._ran_lately(c)), default=0.0)

    def _percentile(self, size: int, share: float) -> float | None:
        known = self._classes.get(size.bit_length())
        return known.percentile(share) if known else None

    def fit(self) -> tuple[float, float]:
        """Slope and base in ms, neither below zero: more items never take less time, no batch takes negative time."""
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
    """How long a batch may run without a sign of progress: 4 x p99, not under the floor, never over the timeout."""
    if p99_ms is None:
        return gpu_timeout_ms
    return min(gpu_timeout_ms, max(4 * p99_ms, floor_ms))
