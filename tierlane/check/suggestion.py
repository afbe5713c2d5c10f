"""From measured batch times to the columns of a model's row: pure arithmetic, no clock, no I/O."""

from collections.abc import Sequence
from typing import NamedTuple

from gpu_pool.worker.service_time import ServiceTime

ENOUGH = 0.9
"""The smallest batch with this part of the best throughput is full: what is larger makes everybody wait for little."""

LONGEST_RUN_MS = 1000.0
"""A batch that runs for longer leaves no time for another try before a request's 4 s are over."""

LONGEST_WAIT_MS = 40.0  # The default of max_wait_ms.


class Timed(NamedTuple):
    """Batches of `size` take `ms` milliseconds at the median."""

    size: int
    ms: float

    @property
    def items_per_s(self) -> float:
        return 1000 * self.size / max(self.ms, 0.001)


class Suggestion(NamedTuple):
    """Values of the columns of `models` by these names. A batch of n takes about `base_ms` + n x `item_ms`."""

    max_batch_size: int
    max_wait_ms: int
    rps_per_gpu: float
    base_ms: float
    item_ms: float


def suggest(timed: Sequence[Timed]) -> Suggestion | None:
    """What these times ask for; None where nothing was measured.

    The wait is at most the base: it is what a second request saves by coming along, so waiting longer never pays.
    """
    if not timed:
        return None
    full = _knee(timed)
    item_ms, base_ms = _fit(timed)
    wait_ms = round(min(base_ms, LONGEST_WAIT_MS))
    return Suggestion(full.size, wait_ms, _rounded(full.items_per_s), round(base_ms, 3), round(item_ms, 4))


def _knee(timed: Sequence[Timed]) -> Timed:
    short = [one for one in timed if one.ms <= LONGEST_RUN_MS] or [min(timed)]
    best = max(one.items_per_s for one in short)
    return min(one for one in short if one.items_per_s >= ENOUGH * best)


def _fit(timed: Sequence[Timed]) -> tuple[float, float]:
    service = ServiceTime()
    for size, ms in timed:
        service.record(size, ms)
    return service.fit()


def _rounded(rate: float) -> float:
    """To three digits: more would claim what a few batches do not show."""
    return float(f"{rate:.3g}")
