"""When a batch should leave: the size worth waiting for, the window, even distances, the arrival rate. Pure.

Waiting pays only where it spares work. Two things make it pay, and the larger one rules: the workers bear an arrival
rate only with batches of a certain size, since every batch costs its `base_ms` again; and a batch costs every process
of the system some CPU. Where one request a batch would do for both, nobody waits. The window is the time in which the
batch should have reached its size, doubled: requests that were expected and did not come (a closed loop, whose every
client waits already) are not waited for.

Batches leave a saturated pool at even distances. Workers that began together end together where every batch takes the
same time, and do so for ever: then nobody is free for most of a run, and a new request waits for it, of whatever tier.
At even distances, with a little of their time left free (the headroom), a worker is nearly always free. Only where more
waits than the idle workers take, and where several workers have runs of about the same time. A late batch may be
followed by an early one: a virtual clock, as in the virtual scheduling algorithm of ITU-T I.371.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from scheduler.protocol.pool_view import WorkerView

BUSY_SHARE = 0.9
"""Of their time, which workers may be busy with batches of the size that is aimed at. Less would make requests wait for
others where a worker is free for each of them; more leaves nothing for what comes at once (`bench/batch_windows.py`)."""

GATHER_S = 0.008
"""A batch costs all processes together about 1 ms of CPU: while batches are not full, one is aimed at for each 8 ms."""

STEADY = 1.25
"""By which factor the longest runs (p95) may differ from what the largest batch should take, and the workers from each
other, and still be steady."""

PATIENCE = 2.0
"""The window, in times in which the batch is expected to have reached its size."""


class Service(NamedTuple):
    """What a batch of n takes on one worker, as measured: `base_ms` + n x `item_ms`; zeros until something was measured.

    `seen_batch`: up to which size it was measured everywhere. `steady`: runs take about what this says on all workers.
    """

    base_ms: float = 0.0
    item_ms: float = 0.0
    seen_batch: float = 0.0
    steady: bool = False


UNKNOWN = Service()


def pool_service(workers: Iterable[WorkerView], known: Service) -> Service:
    """The mean of the healthy workers that have measured anything; what is known already where none has."""
    measured = [worker for worker in workers if worker.healthy and worker.seen_batch > 0]
    if not measured:
        return known
    return Service(
        fmean(worker.base_ms for worker in measured),
        fmean(worker.item_ms for worker in measured),
        min(worker.seen_batch for worker in measured),
        _steady(measured),
    )


def _steady(workers: Sequence[WorkerView]) -> bool:
    """Whether each takes what was measured, and all of them about the same: of unlike ones the mean says too little."""
    size = min(worker.seen_batch for worker in workers)
    runs_ms = [worker.base_ms + size * worker.item_ms for worker in workers]
    return max(runs_ms) <= STEADY * min(runs_ms) and all(_as_expected(worker) for worker in workers)


def _as_expected(worker: WorkerView) -> bool:
    expected_ms = worker.base_ms + worker.seen_batch * worker.item_ms
    return expected_ms / STEADY <= worker.service_p95_ms <= expected_ms * STEADY


def target_size(arrivals_per_s: float, workers: int, service: Service, max_batch_size: int) -> int:
    """The size at which a part batch should leave; 1: there is nothing to wait for."""
    spare_ms = BUSY_SHARE * 1000 * workers - arrivals_per_s * service.item_ms
    base_ms = arrivals_per_s * service.base_ms
    if base_ms and base_ms >= spare_ms * max_batch_size:  # Even full batches are more than they bear well.
        return max_batch_size
    gathered = min(max_batch_size, int(arrivals_per_s * GATHER_S))
    return max(1, int(base_ms / spare_ms) if base_ms else 0, gathered)


def window_ms(target: int, arrivals_per_s: float, max_wait_ms: float) -> float:
    """How long the first member of a part batch may wait for the others; never over the model's own window."""
    if target <= 1 or arrivals_per_s <= 0:
        return 0.0
    return min(max_wait_ms, 1000 * PATIENCE * target / arrivals_per_s)


WHOLE_HEADROOM_WORKERS = 8
"""Fewer workers keep a smaller part of their time free: each is a larger part of the capacity, and less is enough.

In a simulation of runs of 50 ms, enterprise a fifth of the capacity, the p99 of four workers falls from 100 to 65 ms for
1.5 % of what they serve, that of two from 105 to 79 ms for 0.2 %.
"""

SLACK_MS = 5.0
"""How late a batch may be, for timers and busy processors, without the ones behind it being late as well."""


def distance_ms(workers: int, service: Service, batch_size: int, headroom: float) -> float:
    """The distance between two full batches; 0: as they come. `headroom`: 0..1 of the workers' time; 0 turns it off."""
    known = service.steady and 2 * service.seen_batch >= batch_size
    if not headroom or not known or workers < 2:
        return 0.0
    kept_free = headroom * min(1.0, workers / WHOLE_HEADROOM_WORKERS)
    return (service.base_ms + batch_size * service.item_ms) / (workers * (1 - kept_free))


def since_due_ms(since_ms: float, distance: float) -> float:
    """How long ago a batch that leaves now was due, where the one before it was due `since_ms` ago."""
    return max(0.0, min(since_ms - distance, SLACK_MS))


class ArrivalRate:
    """An EWMA over irregular intervals: old news fades with `half_life_s`."""

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
        """The average as of now: silence since the last record counts as no arrivals."""
        if self._seen_at is None:
            return 0.0
        return self._rate * math.exp(-self._decay * max(0.0, now_s - self._seen_at))
