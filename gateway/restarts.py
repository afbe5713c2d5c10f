"""Which workers have another model process than before: a death that was over before a heartbeat could be missed.

A worker that leaves in order and comes again is another one: only who stayed on the list has lost its model.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.finding import Finding, clock, first_of
from scheduler.protocol.pool_view import WorkerView

TOLD_MS = 3000
"""For so long health tells of one: whoever looks each second sees it. The page's events keep it for longer."""

NAMED = 5


class Restart(NamedTuple):
    """When another model process was first seen, by Redis' wall clock."""

    worker: str
    at_ms: int


class Restarts:
    """Those of one pool. `note` is called with every fresh look."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._latest: dict[str, Restart] = {}

    def note(self, workers: Sequence[WorkerView], now_ms: int) -> None:
        """Take the process ids that the workers tell; 0 while there is none."""
        for worker in workers:
            if worker.model_pid and self._pids.get(worker.id, worker.model_pid) != worker.model_pid:
                self._latest[worker.id] = Restart(worker.id, now_ms)
        self._pids = {worker.id: worker.model_pid or self._pids.get(worker.id, 0) for worker in workers}
        self._pids = {name: pid for name, pid in self._pids.items() if pid}
        self._latest = {each.worker: each for each in self._latest.values() if now_ms - each.at_ms < TOLD_MS}

    @property
    def all(self) -> tuple[Restart, ...]:
        """Of the last seconds, the latest first."""
        return tuple(sorted(self._latest.values(), key=lambda each: each.at_ms, reverse=True))


def restarted(latest: Sequence[Restart]) -> Finding:
    """Whether any model process was replaced just now."""
    if not latest:
        return Finding("models:restarted", "component", "healthy", 0, "workers")
    named = first_of([f"{each.worker} (at {clock(each.at_ms)})" for each in latest], NAMED)
    reason = f"Another model process than before: {named}."
    return Finding("models:restarted", "component", "degraded", len(latest), "workers", reason)
