"""When a batch should leave: its target size, the window, even distances, the arrival rate. Pure.

Waiting is useful only if it saves work, for two reasons; the larger size applies. Every batch costs its `base_ms`, so the
workers can serve an arrival rate only with batches of a certain size. And every batch costs CPU in all processes. If one
request per batch is sufficient for both, batches do not wait. The window is twice the time in which the batch should reach
its size: requests that were expected and did not arrive (for example because every client waits for a response) are not
waited for.

Batches leave a saturated pool at even distances. Workers that start together and have equal batches also end together, and
continue so: then for most of a run no worker is free, and new requests of all tiers wait. At even distances, with a small
part of their time kept free (the headroom), a worker is nearly always free. This applies only if more requests are queued
than the idle workers take, and if several workers have runs of similar duration. A late batch may be followed by an early
one: a virtual clock, as in the virtual scheduling algorithm of ITU-T I.371. Part batches have a distance too, while at most half
of the workers are idle: a run divided by the workers, or the time in which the target size is expected, if that is longer. Then
they leave with the requests that have arrived.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from scheduler.protocol.pool_view import WorkerView

BUSY_SHARE = 0.9
"""The share of their time for which workers may be busy with batches of the target size. A smaller share would delay requests
while workers are free; a larger one leaves no time for bursts (`tools/bench/batch_windows.py`)."""

GATHER_S = 0.008
"""A batch costs all processes together about 1 ms of CPU: while batches are not full, the target is one per 8 ms."""

STEADY = 1.25
"""Runs are steady if the longest (p95) and the expected duration of the largest batch, and the durations of the workers,
differ by at most this factor."""
PATIENCE = 2.0
"""The window, as a multiple of the time in which the batch is expected to reach its size."""


class Service(NamedTuple):
    """The measured duration of a batch of n on one worker: `base_ms` + n x `item_ms`; zeros before the first measurement.

    `seen_batch`: the largest size that all workers measured. `steady`: the runs of all workers take about this duration.
    """

    base_ms: float = 0.0
    item_ms: float = 0.0
    seen_batch: float = 0.0
    steady: bool = False


UNKNOWN = Service()


def pool_service(workers: Iterable[WorkerView], known: Service) -> Service:
    """The mean of the healthy workers with measurements; `known` if there are none."""
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
    """Whether each worker has its expected duration, and all workers have similar ones."""
    size = min(worker.seen_batch for worker in workers)
    runs_ms = [worker.base_ms + size * worker.item_ms for worker in workers]
    return max(runs_ms) <= STEADY * min(runs_ms) and all(_as_expected(worker) for worker in workers)


def _as_expected(worker: WorkerView) -> bool:
    expected_ms = worker.base_ms + worker.seen_batch * worker.item_ms
    return expected_ms / STEADY <= worker.service_p95_ms <= expected_ms * STEADY


def target_size(arrivals_per_s: float, workers: int, service: Service, max_batch_size: int) -> int:
    """The size at which a part batch should leave; 1: it should not wait."""
    spare_ms = BUSY_SHARE * 1000 * workers - arrivals_per_s * service.item_ms
    base_ms = arrivals_per_s * service.base_ms
    if base_ms and base_ms >= spare_ms * max_batch_size:  # Even full batches exceed the target utilization.
        return max_batch_size
    gathered = min(max_batch_size, int(arrivals_per_s * GATHER_S))
    return max(1, int(base_ms / spare_ms) if base_ms else 0, gathered)


def window_ms(target: int, arrivals_per_s: float, max_wait_ms: float) -> float:
    """How long the first request of a part batch may wait for others; at most the model's own window."""
    if target <= 1 or arrivals_per_s <= 0:
        return 0.0
    return min(max_wait_ms, 1000 * PATIENCE * target / arrivals_per_s)


WHOLE_HEADROOM_WORKERS = 8
"""Fewer workers keep a smaller part of their time free, because each is a larger part of the capacity and less is sufficient.

In a simulation with runs of 50 ms, and a fifth of the capacity for enterprise, the p99 of four workers falls from 100 to
65 ms for 1.5 % of their throughput, that of two from 105 to 79 ms for 0.2 %.
"""

SLACK_MS = 5.0
"""How late a batch may be, because of timers and busy processors, without delaying the next ones."""


def distance_ms(workers: int, service: Service, batch_size: int, headroom: float) -> float:
    """Milliseconds between two full batches; 0: no distance. `headroom`: 0..1 of the workers' time; 0 disables it."""
    known = service.steady and 2 * service.seen_batch >= batch_size
    if not headroom or not known or workers < 2:
        return 0.0
    kept_free = headroom * min(1.0, workers / WHOLE_HEADROOM_WORKERS)
    return (service.base_ms + batch_size * service.item_ms) / (workers * (1 - kept_free))


LEAST_DISTANCE_MS = 5.0
"""Shorter distances between part batches are within the accuracy of timers, and would only cost wake-ups."""

LEAST_EXPECTED = 0.5
"""Requests that must be expected within a distance: otherwise a request would wait although no other one needs the worker."""


def part_distance_ms(workers: int, idle: int, service: Service, size: int, arrivals_per_s: float) -> float:
    """Milliseconds between two part batches of `size`; 0: no distance, as while more than half of the workers are idle.

    If each request got an idle worker at once, all workers would begin within a short time, and none would end soon: with
    runs of 200 ms, five workers and 40 requests/s, the p99 of the wait is 40 instead of 85 ms (`tools/bench/batch_windows.py`).
    """
    if workers < 2 or 2 * idle > workers or not service.steady:
        return 0.0
    distance = (service.base_ms + size * service.item_ms) / workers
    is_needed = distance >= LEAST_DISTANCE_MS and arrivals_per_s * distance >= 1000 * LEAST_EXPECTED
    return distance if is_needed else 0.0


def since_due_ms(since_ms: float, distance: float) -> float:
    """Time since a batch that leaves now was due, if the previous one was due `since_ms` ago."""
    return max(0.0, min(since_ms - distance, SLACK_MS))


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
