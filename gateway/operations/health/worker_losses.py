"""The lost workers of a pool.

Redis removes a worker five minutes after its last heartbeat, or when it shuts down; its loss is remembered here for
longer, because it explains the missing capacity.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gateway.limits.capacity import is_slow
from scheduler.protocol.pool_view import Observation, WorkerView

INTENDED_STATUSES = ("cordoned", "draining")  # An operator caused these.
WORKER_LOSS_KEEP_MS = 15 * 60_000
ACTIVE_STATUSES = ("ready", "busy", "paused")  # A worker without heartbeats whose last status is one of these is lost.


class LostWorker(NamedTuple):
    """A worker that was lost at `at_ms` of Redis' wall clock."""

    worker: str
    at_ms: int


class WorkerLosses:
    """The lost workers of one pool. `update` is called with each new observation. A pausing worker is not lost."""

    def __init__(self) -> None:
        self._serving: frozenset[str] = frozenset()
        self._lost: dict[str, LostWorker] = {}
        self._first_seen: dict[str, int] | None = None  # None before the first observation.
        self._replaced: dict[str, str] = {}  # Lost worker -> the worker that serves in its place.

    def update(self, workers: Sequence[WorkerView], now_ms: int, elsewhere: Collection[str] = ()) -> None:
        """Add workers that stopped serving; remove those that serve again or were lost more than WORKER_LOSS_KEEP_MS ago.

        `elsewhere`: those that serve other cells.
        """
        serving = frozenset(worker.id for worker in workers if worker.healthy or worker.pausing)
        unhealthy = {worker.id: worker for worker in workers if worker.id not in serving}
        for worker_id, worker in unhealthy.items():
            if worker.status in INTENDED_STATUSES or is_slow(worker):
                continue
            # A worker that was never observed serving may just be starting.
            if worker_id in self._serving or worker.status in ACTIVE_STATUSES:
                self._lost.setdefault(worker_id, LostWorker(worker_id, now_ms - round(worker.age_ms)))
        for worker_id in self._serving - serving - unhealthy.keys():
            self._lost.setdefault(worker_id, LostWorker(worker_id, now_ms))
        oldest = now_ms - WORKER_LOSS_KEEP_MS
        returned = serving.union(elsewhere)
        self._lost = {
            each.worker: each for each in self._lost.values() if each.at_ms > oldest and each.worker not in returned
        }
        self._serving = serving
        self._update_replaced(workers, unhealthy.keys(), now_ms)

    def _update_replaced(self, workers: Sequence[WorkerView], unhealthy: Collection[str], now_ms: int) -> None:
        """Assign to each lost worker, the longest lost first, one that was first observed later and serves."""
        # Workers of the first observation are not replacements: when they started is not known.
        known = {each.id: 0 for each in workers} if self._first_seen is None else self._first_seen
        self._first_seen = first_seen = {each.id: known.get(each.id, now_ms) for each in workers}
        self._replaced = {
            lost: other
            for lost, other in self._replaced.items()
            if lost not in self._serving and other in self._serving
        }
        for loss in reversed(self.all):
            taken = self._replaced.values()
            started = (each for each in self._serving if first_seen[each] >= loss.at_ms and each not in taken)
            other = min(started, key=lambda each: (first_seen[each], each), default=None)
            if other is not None:
                self._replaced[loss.worker] = other
        for worker in self._replaced.keys() - unhealthy:
            self._lost.pop(worker, None)

    def without_replaced(self, seen: Observation, elsewhere: Collection[str] = ()) -> Observation:
        """The observation without silent workers that were replaced: Redis lists them for five minutes.

        Also without those that serve other cells, `elsewhere`, and have not ended their batches here, and those without a name
        that failed at their start and were started again.
        """
        gone = {each.id for each in seen.workers if each.status in ACTIVE_STATUSES and each.id in self._replaced}
        gone |= {each.id for each in seen.workers if not each.healthy and each.id in elsewhere}
        gone |= {each.id for each in seen.workers if each.status == "failed" and self._started_again(each, seen)}
        return replace(seen, workers=[each for each in seen.workers if each.id not in gone]) if gone else seen

    def _started_again(self, failed: WorkerView, seen: Observation) -> bool:
        """Whether another worker of the same host started later: without a name, a worker has another id at each start."""
        unnamed = [each for each in seen.workers if each.host == failed.host and each.id == f"{each.host}-{each.pid}"]
        at_ms, first_seen = seen.now_ms - failed.age_ms, self._first_seen or {}
        others = [each.id for each in unnamed if each.id != failed.id]
        return len(others) < len(unnamed) and any(first_seen.get(each, 0) > at_ms for each in others)

    @property
    def all(self) -> tuple[LostWorker, ...]:
        """The latest first."""
        lost = (each for each in self._lost.values() if each.worker not in self._replaced)
        return tuple(sorted(lost, key=lambda loss: loss.at_ms, reverse=True))
