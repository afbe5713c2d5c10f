"""The restarted model processes of a pool: a worker with a new model process has lost its previous one."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from scheduler.protocol.pool_view import WorkerView

RESTART_REPORTED_MS = 3000
"""A restart is reported for this time, so that a client that polls each second sees it. Dashboard events last longer."""

RESTARTS_COUNTED_MS = 60_000
MOST_RESTARTS_COUNTED = 100


class Restart(NamedTuple):
    """When a worker's new model process was first observed, by Redis' wall clock."""

    worker: str
    at_ms: int


class Restarts:
    """The restarted model processes of one pool. `update` is called with each new observation."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._latest: dict[str, Restart] = {}
        self._times: deque[int] = deque(maxlen=MOST_RESTARTS_COUNTED)

    def update(self, workers: Sequence[WorkerView], now_ms: int) -> None:
        """Compare the process ids that the workers report; 0 while there is no process."""
        for worker in workers:
            if worker.model_pid and self._pids.get(worker.id, worker.model_pid) != worker.model_pid:
                self._latest[worker.id] = Restart(worker.id, now_ms)
                self._times.append(now_ms)
        while self._times and now_ms - self._times[0] >= RESTARTS_COUNTED_MS:
            self._times.popleft()
        self._pids = {worker.id: worker.model_pid or self._pids.get(worker.id, 0) for worker in workers}
        self._pids = {name: pid for name, pid in self._pids.items() if pid}
        self._latest = {
            each.worker: each for each in self._latest.values() if now_ms - each.at_ms < RESTART_REPORTED_MS
        }

    @property
    def all(self) -> tuple[Restart, ...]:
        """The latest first."""
        return tuple(sorted(self._latest.values(), key=lambda each: each.at_ms, reverse=True))

    @property
    def last_minute(self) -> int:
        """The number of restarts within a minute, at most 100."""
        return len(self._times)
