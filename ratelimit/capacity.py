"""Capacity: how many requests per second the healthy GPUs can serve, with the slew of limits and Retry-After. Pure.

A batch of n takes s(n) = base + n x item milliseconds. The rate with full batches of B is then B / s(B). While only
smaller batches of n were measured it lies between n / s(n) (batching gains nothing) and B / s(n) (batching costs
nothing), and only more load can show where: limits that are built on too low an estimate would keep that load away for
ever. So the estimate is corrected by what the queue shows:

* requests are rejected and nothing is backlogged: the estimate is too low, and the correction grows;
* requests are backlogged although all GPUs are busy: the served rate is the capacity, and the correction follows it.

Limits fall at once and rise slowly, so that a flapping GPU does not make them flap. Retry-After for want of capacity
follows from how fast the queue moves.

Sources: BBR (Cardwell et al. 2016: the delivered rate at the bottleneck is the capacity, found by probing upwards),
Vegas and Gradient2 of Netflix' concurrency-limits (a limit that is not used is not raised), DAGOR (WeChat, SoCC 2018:
overload is seen by the queueing delay).
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import median
from typing import NamedTuple

PROBES = ((7.0, 2.0), (5.0, 1.3), (3.0, 1.1), (0.0, 1.0))
"""Growth of the correction a second by the seconds since the last backlog. Soon after one the estimate is off by little, and
a fast probe would only make the limits swing; the longer none comes back, the further off it is."""
PROBE_UNMEASURED = 2.0
"""The same while only small batches were measured."""
BACKLOG_S = 3.0
"""Seconds that a backlog must last before the served rate counts as the capacity,"""
BACKLOG_RUNS = 4.5
"""and runs of a batch: a served rate is that of the last three, of which none may have begun before the backlog."""
MEASURED_FROM = 0.5
"""The confidence from which an estimate counts as measured: batches of half the full size."""
TOLERANCE = 0.9
"""A served rate from this part of the estimate on confirms it: gaps between batches cost a few percent."""
STEADY = 0.1
"""Of the reported rates: moved by more, they are others than those that the served rate belongs to."""
LEAST_CORRECTION = 0.02
LONGEST_STEP_S = 1.0
GUESS_ERROR = 10.0
"""A guess may be so many times too low: nobody is refused for a wait that is only guessed to be long."""


class CapacityEvidence(StrEnum):
    """What a capacity is derived from."""

    FIXED = "fixed"  # the row of the model says so (`rps_per_gpu_fixed`)
    MEASURED = "measured"  # batches of at least half the full size were measured
    PROBING = "probing"  # only smaller batches were: an extrapolation, probed upwards
    PRIOR = "prior"  # nothing was measured: `rps_per_gpu` of the model's row; no limit is built on it


class GpuRate(NamedTuple):
    """What one healthy GPU reports. A batch of n takes `base_ms` + n x `item_ms`, measured up to `seen_batch` (0: never).

    `concurrency` batches run at a time. `served_rps`: requests/s over its last completed runs (0: not known). `fresh_batch`:
    the largest that ran lately.
    """

    base_ms: float = 0.0
    item_ms: float = 0.0
    seen_batch: float = 0.0
    concurrency: int = 1
    served_rps: float = 0.0
    fresh_batch: float = 0.0

    def run_ms(self, size: float) -> float:
        """Milliseconds that a batch of `size` takes."""
        return max(self.base_ms + size * self.item_ms, 0.001)

    def full_rps(self, batch: int) -> float:
        """Requests/s with full batches of `batch`, by the fit; 0 while nothing was measured."""
        return self.concurrency * 1000 * batch / self.run_ms(batch) if self.seen_batch > 0 else 0.0

    def most_rps(self, batch: int) -> float:
        """The same if batches larger than those that run now took no longer: more is impossible."""
        ran = min(self.fresh_batch or self.seen_batch, batch)
        return self.concurrency * 1000 * batch / self.run_ms(ran) if self.seen_batch > 0 else 0.0


class PoolRate(NamedTuple):
    """The rates of a pool's healthy GPUs together, requests/s. `confidence` 0..1: how near to full the measured batches were.

    A GPU that was never measured counts as the median of those that were.
    """

    full_rps: float
    most_rps: float
    confidence: float

    @classmethod
    def of(cls, gpus: Sequence[GpuRate], batch: int) -> "PoolRate":
        """The sum over `gpus` with full batches of `batch`; zeros where nothing was measured."""
        seen = [gpu for gpu in gpus if gpu.seen_batch > 0]
        if not seen or batch <= 0:
            return cls(0.0, 0.0, 0.0)
        full, most = [gpu.full_rps(batch) for gpu in seen], [gpu.most_rps(batch) for gpu in seen]
        missing = len(gpus) - len(seen)
        confidence = sum(min(1.0, gpu.seen_batch / batch) for gpu in seen) / len(gpus)
        return cls(sum(full) + missing * median(full), sum(most) + missing * median(most), confidence)


class PoolLoad(NamedTuple):
    """What the queues of a pool show. `backlogged`: requests wait for longer than runs explain although every GPU has work.

    `limiting`: somebody is refused for capacity, or would be. `run_ms`: how long a batch takes now, 0 where not known.
    """

    backlogged: bool
    limiting: bool
    run_ms: float = 0.0


class Capacity(NamedTuple):
    """An estimate in requests/s, before `target_utilization`; `confidence` 0..1."""

    rps: float
    evidence: CapacityEvidence
    confidence: float

    @property
    def binding(self) -> bool:
        """Whether limits may follow from it: a guess only serves to predict waits."""
        return self.evidence is not CapacityEvidence.PRIOR

    @property
    def wait_rps(self) -> float:
        """The rate by which waits are predicted."""
        return self.rps if self.binding else GUESS_ERROR * self.rps


class CapacityEstimator:
    """The corrected estimate of one pool. Times are monotonic seconds; every gateway comes to the same from the same looks."""

    def __init__(self) -> None:
        self.correction = 1.0
        """Times the rates that the GPUs report."""
        self._looked_at: float | None = None
        self._backlog_from: float | None = None
        self._backlog_rps = 0.0  # The rates that were reported when the backlog began.
        self._confirmed_at = -math.inf

    def look(self, gpus: Sequence[GpuRate], batch: int, prior_rps: float, load: PoolLoad, now: float) -> Capacity:
        """The capacity of `gpus`, all healthy; `prior_rps` (requests/s of one GPU) counts while nothing was measured."""
        elapsed_s = min(LONGEST_STEP_S, max(0.0, now - self._looked_at)) if self._looked_at is not None else 0.0
        self._looked_at = now
        pool = PoolRate.of(gpus, batch)
        if pool.full_rps <= 0:
            self.correction, self._backlog_from = 1.0, None
            return Capacity(prior_rps * len(gpus), CapacityEvidence.PRIOR, 0.0)
        if load.backlogged:
            if self._lasts_s(pool.full_rps, now) >= max(BACKLOG_S, BACKLOG_RUNS * load.run_ms / 1000):
                self._confirmed_at = now
                self._follow(sum(gpu.served_rps for gpu in gpus) / pool.full_rps)
        else:
            self._backlog_from = None
            if load.limiting:
                self.correction *= self._growth(pool, now) ** elapsed_s
        self.correction = max(LEAST_CORRECTION, min(self.correction, pool.most_rps / pool.full_rps))
        evidence = CapacityEvidence.MEASURED if pool.confidence >= MEASURED_FROM else CapacityEvidence.PROBING
        return Capacity(pool.full_rps * self.correction, evidence, pool.confidence)

    def resume(self, correction: float) -> None:
        """Begin with the correction of another gateway, which has watched for longer."""
        self.correction = correction

    def _lasts_s(self, full_rps: float, now: float) -> float:
        """Seconds since the backlog began; anew where the reported rates move, since the served rate lags behind them."""
        if self._backlog_from is None or abs(full_rps - self._backlog_rps) > STEADY * self._backlog_rps:
            self._backlog_from, self._backlog_rps = now, full_rps
        return now - self._backlog_from

    def _follow(self, served: float) -> None:
        """All GPUs are busy and more waits: what they serve is what they can do. What was probed on top was too much."""
        if self.correction > 1:
            self.correction = max(1.0, served)
        if 0 < served < TOLERANCE * self.correction or served > self.correction:
            self.correction = served

    def _growth(self, pool: PoolRate, now: float) -> float:
        calm_s = now - self._confirmed_at
        growth = next(growth for after_s, growth in PROBES if calm_s >= after_s)
        return max(growth, PROBE_UNMEASURED) if pool.confidence < MEASURED_FROM else growth


LEAST_MS = 100
"""A few milliseconds tell a client to try again at once, and their jitter spreads nobody."""
MOST_MS = 30_000
"""A line that long has moved on before; a client that is told more gives up."""


def retry_after_ms(waiting: int, drain_rps: float, fallback_ms: float) -> int:
    """Milliseconds until `waiting` requests are served at the measured `drain_rps` answers/s, 100 to 30,000.

    `fallback_ms`, within the same bounds, where nothing was answered lately, so that no rate is measured.
    """
    wait_ms = waiting / drain_rps * 1000 if drain_rps > 0 else fallback_ms
    # In this order, max also turns what is not a number into the least.
    return round(min(max(LEAST_MS, wait_ms), MOST_MS))


RELAX_PER_SECOND = 0.25
"""How much of the full limit comes back each second: from nothing to everything in four seconds."""


def relax(previous: float, target: float, elapsed_s: float) -> float:
    """The next factor (0..1) on the way from `previous` to `target`, `elapsed_s` later."""
    if target <= previous:
        return target
    return min(target, previous + RELAX_PER_SECOND * max(0.0, elapsed_s))
