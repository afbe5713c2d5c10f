"""Which workers were lost, and when: what a look at the pool shows now, remembered for as long as it explains something.

A worker that is gone for five minutes is forgotten by Redis, and one that leaves in order at once; the capacity that went
with it is missed for longer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.protocol.pool_view import WorkerView

ON_PURPOSE = ("cordoned", "draining")  # Somebody wanted it so.
KEEP_MS = 15 * 60_000
SILENT = ("ready", "busy", "paused")  # The last word of a worker that did not know that it would be lost.


class Loss(NamedTuple):
    """A worker that served and does not any more; `at_ms` is Redis' wall clock."""

    worker: str
    at_ms: int


class Losses:
    """Those of one pool. `note` is called with every fresh look. One that pauses for a moment serves."""

    def __init__(self) -> None:
        self._serving: frozenset[str] = frozenset()
        self._lost: dict[str, Loss] = {}

    def note(self, workers: Sequence[WorkerView], now_ms: int) -> None:
        """Remember who serves no more, and forget who is back, or was lost long ago."""
        serving = frozenset(worker.id for worker in workers if worker.healthy or worker.pausing)
        ill = {worker.id: worker for worker in workers if worker.id not in serving}
        for worker_id, worker in ill.items():
            if worker.status in ON_PURPOSE:
                continue
            # A worker that was never seen to serve may just be starting.
            if worker_id in self._serving or worker.status in SILENT:
                self._lost.setdefault(worker_id, Loss(worker_id, now_ms - round(worker.age_ms)))
        for worker_id in self._serving - serving - ill.keys():
            self._lost.setdefault(worker_id, Loss(worker_id, now_ms))
        oldest = now_ms - KEEP_MS
        self._lost = {
            each.worker: each for each in self._lost.values() if each.at_ms > oldest and each.worker not in serving
        }
        self._serving = serving

    @property
    def all(self) -> tuple[Loss, ...]:
        """The latest first."""
        return tuple(sorted(self._lost.values(), key=lambda loss: loss.at_ms, reverse=True))
