"""The measured duration of batches on the workers of a pool. Pure."""

from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from scheduler.protocol.pool_view import WorkerView

STEADY = 1.25
"""Runs are steady if the longest (p95) and the expected duration of the largest batch, and the durations of the workers,
differ by at most this factor."""


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
    size = min(worker.seen_batch for worker in measured)
    runs_ms = [worker.base_ms + size * worker.item_ms for worker in measured]
    is_steady = max(runs_ms) <= STEADY * min(runs_ms)
    for worker in measured:
        expected_ms = worker.base_ms + worker.seen_batch * worker.item_ms
        is_steady = is_steady and expected_ms / STEADY <= worker.service_p95_ms <= expected_ms * STEADY
    base_ms, item_ms = fmean(worker.base_ms for worker in measured), fmean(worker.item_ms for worker in measured)
    return Service(base_ms, item_ms, size, is_steady)
