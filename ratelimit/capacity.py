"""Capacity: how many requests per second the healthy GPUs can serve, with the slew of limits and Retry-After. Pure.

A batch of n takes s(n) = base + n x item milliseconds. The rate with full batches of B is then B / s(B). While only
smaller batches of n were measured it lies between n / s(n) (batching gains nothing) and B / s(n) (batching costs
nothing), and only more load can show where: limits that are built on too low an estimate would keep that load away for
ever. So the estimate is corrected by the state of the queue:

* requests are rejected and nothing is backlogged: the estimate is too low, and the correction grows;
* requests are backlogged although all GPUs are busy: the served rate is the capacity, and the correction follows it.

Engines with slots have another estimate, in `ratelimit/slot_capacity.py`, from the same reports.

Limits fall at once and rise slowly, so that a flapping GPU does not make them flap. Retry-After for missing capacity
is derived from the drain rate of the queue.

Sources: BBR (Cardwell et al. 2016: the delivered rate at the bottleneck is the capacity, found by probing upwards),
Vegas and Gradient2 of Netflix' concurrency-limits (a limit that is not used is not raised), DAGOR (WeChat, SoCC 2018:
overload is detected by the queueing delay).
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import median
from typing import NamedTuple

PROBES = ((7.0, 2.0), (5.0, 1.3), (3.0, 1.1), (0.0, 1.0))
"""Growth of the correction per second, by the seconds since the last backlog. Shortly after a backlog the estimate is nearly
right, and a fast probe would make the limits oscillate; the longer no backlog returns, the larger its error may be."""
PROBE_UNMEASURED = 2.0
"""The growth while only small batches were measured."""
BACKLOG_S = 3.0
"""Seconds that a backlog must last before the served rate counts as the capacity,"""
BACKLOG_RUNS = 4.5
"""and runs of a batch: the served rate is that of the last three runs, which must have started after the backlog began."""
MEASURED_FROM = 0.5
"""The confidence from which an estimate counts as measured: batches of half the full size."""
TOLERANCE = 0.9
"""A served rate of at least this share of the estimate confirms it: gaps between batches cost a few percent."""
STEADY = 0.1
"""If the reported rates change by more than this, an older served rate does not apply to them."""
LEAST_CORRECTION = 0.02
LONGEST_STEP_S = 1.0
GUESS_ERROR = 10.0
"""A prior may be too low by this factor, so that no request is rejected for a predicted wait that may be wrong."""

LEAST_MS = 100
"""Shorter times would make clients retry at once, without a spread by jitter."""
MOST_MS = 30_000
"""Longer predictions are unreliable, and clients give up."""

RELAX_PER_SECOND = 0.25
"""How much of the full limit is restored per second: from 0 to 1 in four seconds."""


class CapacityEvidence(StrEnum):
    """What a capacity is derived from."""

    FIXED = "fixed"  # by the row of the model (`rps_per_gpu_fixed`)
    MEASURED = "measured"  # batches of at least half the full size were measured
    PROBING = "probing"  # only smaller batches were measured: an extrapolation, probed upwards
    PRIOR = "prior"  # nothing was measured: `rps_per_gpu` of the model's row; it sets no limit


class GpuRate(NamedTuple):
    """The report of one healthy GPU. A batch of n takes `base_ms` + n x `item_ms`, measured up to `seen_batch` (0: never).

    `concurrency` batches run at a time. `served_rps`: requests/s of its last completed runs (0: unknown). `fresh_batch`:
    the largest recent batch. With `slots`, so many requests run at a time, each by itself: a request takes `base_ms`, and
    `fresh_batch` is the mean number of requests that ran in the last seconds.
    """

    base_ms: float = 0.0
    item_ms: float = 0.0
    seen_batch: float = 0.0
    concurrency: int = 1
    served_rps: float = 0.0
    fresh_batch: float = 0.0
    slots: int = 0

    def run_ms(self, size: float) -> float:
        """The time of a batch of `size`, in ms."""
        return max(self.base_ms + size * self.item_ms, 0.001)

    def full_rps(self, batch: int) -> float:
        """Requests/s with full batches of `batch`, by the fit, or in all slots; 0 if nothing was measured."""
        if self.slots:
            return 1000 * self.slots / self.run_ms(1) if self.seen_batch > 0 else 0.0
        return self.concurrency * 1000 * batch / self.run_ms(batch) if self.seen_batch > 0 else 0.0

    def most_rps(self, batch: int) -> float:
        """The upper bound: if batches larger than the current ones took no longer."""
        if self.slots:
            return self.full_rps(batch)
        ran = min(self.fresh_batch or self.seen_batch, batch)
        return self.concurrency * 1000 * batch / self.run_ms(ran) if self.seen_batch > 0 else 0.0


class PoolRate(NamedTuple):
    """The rates of all healthy GPUs of a pool, requests/s. `confidence` 0..1: the size of the measured batches relative to full.

    A GPU without measurements counts as the median of the others.
    """

    full_rps: float
    most_rps: float
    confidence: float

    @classmethod
    def of(cls, gpus: Sequence[GpuRate], batch: int) -> "PoolRate":
        """The sum over `gpus` with full batches of `batch`; zeros if nothing was measured."""
        measured = [gpu for gpu in gpus if gpu.seen_batch > 0]
        if not measured or batch <= 0:
            return cls(0.0, 0.0, 0.0)
        full, most = [gpu.full_rps(batch) for gpu in measured], [gpu.most_rps(batch) for gpu in measured]
        missing = len(gpus) - len(measured)
        confidence = sum(min(1.0, gpu.seen_batch / batch) for gpu in measured) / len(gpus)
        return cls(sum(full) + missing * median(full), sum(most) + missing * median(most), confidence)


class PoolLoad(NamedTuple):
    """The state of a pool's queues. `backlogged`: requests wait longer than runs explain although every GPU has work.

    `limiting`: requests are rejected for missing capacity, or would be. `run_ms`: the current time of a batch, 0 if unknown.
    """

    backlogged: bool
    limiting: bool
    run_ms: float = 0.0


class Capacity(NamedTuple):
    """An estimate in requests/s, before `target_utilization`; `confidence` 0..1.

    `has_room`: an engine has free slots, or gets more of them. Then no request is rejected for capacity.
    """

    rps: float
    evidence: CapacityEvidence
    confidence: float
    has_room: bool = False

    @property
    def binding(self) -> bool:
        """Whether it sets limits; a prior is used for predicted waits only."""
        return self.evidence is not CapacityEvidence.PRIOR and not self.has_room

    @property
    def wait_rps(self) -> float:
        """The rate for predicted waits."""
        return self.rps if self.binding else GUESS_ERROR * self.rps


class CapacityEstimator:
    """The corrected estimate of one pool. Times are monotonic seconds; gateways derive the same from the same observations."""

    def __init__(self) -> None:
        self.correction = 1.0
        """The factor on the reported rates."""
        self._looked_at: float | None = None
        self._backlog_from: float | None = None
        self._backlog_rps = 0.0  # The reported rates when the backlog began.
        self._confirmed_at = -math.inf

    def look(self, gpus: Sequence[GpuRate], batch: int, prior_rps: float, load: PoolLoad, now: float) -> Capacity:
        """Update with an observation of all healthy GPUs; `prior_rps` (requests/s of one GPU) counts while nothing was measured."""
        since_s = max(0.0, now - self._looked_at) if self._looked_at is not None else 0.0
        elapsed_s, self._looked_at = min(LONGEST_STEP_S, since_s), now
        if since_s > LONGEST_STEP_S:
            self.interrupt()
        pool = PoolRate.of(gpus, batch)
        if pool.full_rps <= 0:
            self.correction, self._backlog_from = 1.0, None
            return Capacity(prior_rps * len(gpus), CapacityEvidence.PRIOR, 0.0)
        if load.backlogged:
            # When the reported rates change, the backlog counts from then on: the served rate lags behind them.
            is_changed = abs(pool.full_rps - self._backlog_rps) > STEADY * self._backlog_rps
            if self._backlog_from is None or is_changed:
                self._backlog_from, self._backlog_rps = now, pool.full_rps
            if now - self._backlog_from >= max(BACKLOG_S, BACKLOG_RUNS * load.run_ms / 1000):
                # All GPUs are busy and requests are queued, so the served rate is the capacity, and a higher correction was wrong.
                self._confirmed_at = now
                served = sum(gpu.served_rps for gpu in gpus) / pool.full_rps
                if self.correction > 1:
                    self.correction = max(1.0, served)
                if 0 < served < TOLERANCE * self.correction or served > self.correction:
                    self.correction = served
        else:
            self._backlog_from = None
            if load.limiting:
                calm_s = now - self._confirmed_at
                growth = next(growth for after_s, growth in PROBES if calm_s >= after_s)
                if pool.confidence < MEASURED_FROM:
                    growth = max(growth, PROBE_UNMEASURED)
                self.correction *= growth**elapsed_s
        self.correction = max(LEAST_CORRECTION, min(self.correction, pool.most_rps / pool.full_rps))
        evidence = CapacityEvidence.MEASURED if pool.confidence >= MEASURED_FROM else CapacityEvidence.PROBING
        return Capacity(pool.full_rps * self.correction, evidence, pool.confidence)

    def interrupt(self) -> None:
        """Note that no GPU is healthy, or none could be observed: a rate served across that time is no capacity."""
        self._backlog_from = None

    def resume(self, correction: float) -> None:
        """Start with the correction of a gateway that has more observations."""
        self.correction = correction


def retry_after_ms(waiting: int, drain_rps: float, fallback_ms: float) -> int:
    """Milliseconds until `waiting` requests are served at the measured `drain_rps` responses/s, 100 to 30,000.

    `fallback_ms`, within the same bounds, if no rate was measured recently.
    """
    wait_ms = waiting / drain_rps * 1000 if drain_rps > 0 else fallback_ms
    # In this order, max also turns NaN into the minimum.
    return round(min(max(LEAST_MS, wait_ms), MOST_MS))


def relax(previous: float, target: float, elapsed_s: float) -> float:
    """The next factor (0..1) on the way from `previous` to `target`, `elapsed_s` later."""
    if target <= previous:
        return target
    return min(target, previous + RELAX_PER_SECOND * max(0.0, elapsed_s))
