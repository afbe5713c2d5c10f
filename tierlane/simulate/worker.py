"""A worker in virtual time: it claims ready batches, runs them for their measured cost, and reports its service times.

As in `gpu_pool/worker/`: one batch runs, the next is claimed shortly before its end if batches come without a pause, and the
service times and the served rate are those of the real `ServiceTime` and `ServedRate`. With several cells, it decides before
each claim, and while it is idle with each heartbeat, whether it moves. While it moves, its run goes on.
"""

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Protocol

from gpu_pool.worker.concurrency import ServedRate
from gpu_pool.worker.prefetch import AHEAD_MS
from gpu_pool.worker.service_time import ServiceTime
from scheduler.protocol.pool_view import WorkerView
from tierlane.simulate.events import EventLoop
from tierlane.simulate.fair_queue import QueuedRequest
from tierlane.simulate.scenario import Costs

BEAT_S = 0.25
"""Between the heartbeats of a worker or a gateway."""

WARM_SAMPLES = 20
"""Measurements of each size that a worker has at the start."""


class SimulatedBatch:
    """A batch of a cell. `empty_part`: the part of its places that is empty, if it has requests of quiet customers only.
    `tier`: if all its requests are of one, else "".
    """

    __slots__ = ("cell", "empty_part", "losses", "requests", "tier")

    def __init__(self, cell: "BatchSource", requests: Sequence[QueuedRequest], empty_part: float, tier: str) -> None:
        self.cell = cell
        self.requests = requests
        self.empty_part = empty_part
        self.tier = tier
        self.losses = 0

    @property
    def words(self) -> float:
        """Of all its requests."""
        return sum(request.words for request in self.requests)


class BatchSource(Protocol):
    """The cell of a worker. Cuts the import cycle with it."""

    ready: deque[SimulatedBatch]
    poppers: deque["SimulatedWorker"]

    def claimed(self, batch: SimulatedBatch, /) -> bool:
        """Requests without time left have ended. Returns whether any is left to run."""

    def started(self, batch: SimulatedBatch, run_s: float, /) -> None: ...
    def finished(self, batch: SimulatedBatch, run_ms: float, /) -> None: ...
    def lost(self, batch: SimulatedBatch, /) -> None: ...
    def destination(self, worker: "SimulatedWorker", /) -> str | None:
        """The cell to which a worker that decides now moves, or None: it stays."""

    def departs(self, worker: "SimulatedWorker", destination: str, /) -> None: ...


class SimulatedWorker:
    """One GPU. `warm_sizes`: of batches that were measured before the start, with their words."""

    def __init__(
        self, name: str, loop: EventLoop, costs: Costs, random: Random, warm_sizes: Sequence[tuple[int, float]] = ()
    ) -> None:
        self.name = name
        self.cell: BatchSource | None = None
        self.decided = -1  # The number of the document that it decided by.
        self.service = ServiceTime()
        self.served = ServedRate()
        self.alive = True
        self._loop = loop
        self._costs = costs
        self._random = random
        self._running: SimulatedBatch | None = None
        self._waiting: SimulatedBatch | None = None
        self._pops = False
        self._popping_since = 0.0
        self._run_ms = 0.0
        self._beats_at = random.random() * BEAT_S
        for size, words in warm_sizes:
            for _ in range(WARM_SAMPLES):
                self.service.record(size, costs.run_ms(size, words))

    @property
    def is_idle(self) -> bool:
        """Whether no batch runs or waits."""
        return self._running is None and self._waiting is None

    def view(self) -> WorkerView:
        """Its heartbeat."""
        item_ms, base_ms = self.service.fit()
        size = len(self._running.requests) if self._running else 0
        return WorkerView(
            self.name,
            "busy" if size else "ready",
            float(size > 0),
            size,
            0.0,
            healthy=True,
            rps=0.0,
            service_p95_ms=self.service.typical_p95_ms(max(1, size or round(self.service.fresh_batch))),
            backend="simulated",
            model_version="1",
            base_ms=base_ms,
            item_ms=item_ms,
            seen_batch=self.service.seen_batch,
            served_rps=self.served.rps,
            fresh_batch=self.service.fresh_batch,
        )

    def join(self, cell: BatchSource) -> None:
        """Serve a cell."""
        self.cell = cell
        if self.alive:
            self.pop()

    def pop(self) -> None:
        """Claim the next batch, or wait for one, unless it moves to another cell."""
        cell = self.cell
        if self._pops or self._waiting is not None or cell is None or not self.alive:
            return
        if self._departs(cell):
            return
        self._popping_since = self._loop.now
        if cell.ready:
            self._claim(cell.ready.popleft())
        else:
            self._pops = True
            cell.poppers.append(self)

    def take(self, batch: SimulatedBatch) -> None:
        """A batch for a worker that waits for one."""
        self._pops = False
        self._claim(batch)

    def reconsider(self) -> None:
        """A heartbeat brought a document: a worker that is idle decides whether it moves."""
        if self._pops and self._running is None and self.cell is not None:
            self._departs(self.cell)

    def _departs(self, cell: BatchSource) -> bool:
        """Whether it moves to another cell now."""
        destination = cell.destination(self)
        if destination is None:
            return False
        self._stop_popping()
        self.cell = None
        cell.departs(self, destination)
        return True

    def last_beat(self, now: float) -> float:
        """When it sent its last heartbeat."""
        return now - (now - self._beats_at) % BEAT_S

    def _stop_popping(self) -> None:
        if self._pops and self.cell is not None:
            self.cell.poppers.remove(self)
        self._pops = False

    def _claim(self, batch: SimulatedBatch) -> None:
        if self.cell is None or not self.cell.claimed(batch):
            self.pop()
            return
        waited_ms = 1000 * (self._loop.now - self._popping_since)
        typical_ms = self.service.typical_p95_ms(max(1, round(self.service.fresh_batch)))
        has_backlog = waited_ms < max(AHEAD_MS, typical_ms)
        if self._running is None:
            self._start(batch, self._costs.dispatch_ms / 1000, has_backlog=has_backlog)
        else:
            self._waiting = batch

    def _start(self, batch: SimulatedBatch, delay_s: float, *, has_backlog: bool) -> None:
        self._running = batch
        run_ms = self._costs.run_ms(len(batch.requests), batch.words)
        if self._costs.spread:
            run_ms *= self._random.lognormvariate(0.0, self._costs.spread)
        self._run_ms = run_ms
        begins_s = self._loop.now + delay_s
        expected_ms = self.service.predicted_ms(len(batch.requests))
        self._loop.at(begins_s, self._begins, batch)
        self._loop.at(begins_s + run_ms / 1000, self._ended, batch)
        if has_backlog and expected_ms > 0:
            self._loop.at(begins_s + max(0.0, expected_ms - AHEAD_MS) / 1000, self._nears_end, batch)

    def _begins(self, batch: SimulatedBatch) -> None:
        if self._running is batch:
            for request in batch.requests:
                request.started_s = self._loop.now
            batch.cell.started(batch, self._run_ms / 1000)

    def _nears_end(self, batch: SimulatedBatch) -> None:
        if self._running is batch:
            self.pop()

    def _ended(self, batch: SimulatedBatch) -> None:
        if self._running is not batch:
            return
        self._running = None
        self.service.record(len(batch.requests), self._run_ms)
        self.served.ended(self._loop.now, len(batch.requests))
        batch.cell.finished(batch, self._run_ms)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._start(waiting, 0.0, has_backlog=True)
        elif not self._pops:
            self.pop()

    def lose(self) -> None:
        """The GPU is lost, with its batches."""
        self.alive = False
        self._stop_popping()
        batches = (self._running, self._waiting)
        self._running = self._waiting = None
        for batch in batches:
            if batch is not None:
                batch.cell.lost(batch)
