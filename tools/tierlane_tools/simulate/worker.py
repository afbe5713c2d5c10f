"""A worker in virtual time: it claims ready batches, runs them for their measured cost, and reports its service times.

As in `gpu_pool/worker/`: one batch runs, the next is claimed shortly before its end if batches come without a pause, and the
service times and the served rate are those of the real `ServiceTime` and `ServedRate`. Others see it as its last heartbeat
reported it. With several cells, it decides before each claim, and while it is idle with each heartbeat, whether it moves, by
the document that the heartbeat brought, or, if that lets it move, by the present one. While it moves, its run goes on.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple, Protocol

from gpu_pool.worker.batch_rates import ServedRate
from gpu_pool.worker.prefetch import AHEAD_MS
from gpu_pool.worker.service_time import ServiceTime
from scheduler.cells.moves import EARLIEST, PERIOD_S
from scheduler.cells.placement import destination
from scheduler.protocol.pool_view import WorkerView
from tierlane_tools.simulate.events import EventLoop
from tierlane_tools.simulate.fair_queue import QueuedRequest
from tierlane_tools.simulate.scenario import Costs

BEAT_S = 0.25
"""Between the heartbeats of a worker or a gateway."""

WARM_SAMPLES = 20
"""Measurements of each size that a worker has at the start."""


class MovesDocument(NamedTuple):
    """The chances of a move to other cells."""

    number: int = -1
    chances: Mapping[str, float] = {}


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
    moves: MovesDocument

    def claimed(self, batch: SimulatedBatch, /) -> bool:
        """Requests without time left have ended. Returns whether any is left to run."""

    def started(self, batch: SimulatedBatch, run_s: float, /) -> None: ...
    def finished(self, batch: SimulatedBatch, run_ms: float, /) -> None: ...
    def lost(self, batch: SimulatedBatch, /) -> None: ...
    def broken(self, batch: SimulatedBatch, /) -> None: ...
    def returned(self, batch: SimulatedBatch, /) -> None: ...
    def count_slots(self, slots: int, free: int, /) -> None: ...
    def more_slots(self) -> None: ...
    def departs(self, worker: "SimulatedWorker", destination: str, /) -> None: ...


class SimulatedWorker:
    """One GPU. `warm_sizes`: of batches that were measured before the start, with their words."""

    def __init__(
        self, name: str, loop: EventLoop, costs: Costs, random: Random, warm_sizes: Sequence[tuple[int, float]] = ()
    ) -> None:
        self.name = name
        self.cell: BatchSource | None = None
        self.reported: WorkerView | None = None  # By its last heartbeat.
        self.service = ServiceTime()
        self.served = ServedRate()
        self.alive = True
        self.counted = (0, 0)  # Its slots and the free ones, as its cell counts them; 0 if it runs batches.
        self._loop = loop
        self._costs = costs
        self._random = random
        self._running: SimulatedBatch | None = None
        self._waiting: SimulatedBatch | None = None
        self._pops = False
        self._popping_since = 0.0
        self._run_ms = 0.0
        self._beat_s = -math.inf  # When it sent its last heartbeat.
        self._next_beat_s = random.random() * BEAT_S  # From the first to the second one.
        self._beats = 0
        self._slower = 1.0
        self._moves = MovesDocument()
        self._decided = MovesDocument().number  # Of the document that it decided by.
        self._decided_s = -math.inf
        for size, words in warm_sizes:
            for _ in range(WARM_SAMPLES):
                self.service.record(size, costs.run_ms(size, words))

    def _report(self) -> WorkerView:
        item_ms, base_ms = self.service.fit()
        size = sum(len(batch.requests) for batch in (self._running, self._waiting) if batch and batch.cell is self.cell)
        return WorkerView(
            self.name,
            "busy" if size else "ready",
            float(size > 0),
            size,
            age_ms=0.0,
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
        """Serve a cell, which gets a heartbeat at once."""
        self.cell = cell
        if self.alive:
            self._beat(self._next_beat_s)
            self._next_beat_s = BEAT_S
            self.pop()

    def _beat(self, next_s: float = BEAT_S) -> None:
        """Send a heartbeat, and the next one after `next_s`. A worker that is idle decides whether it moves, else reads the next
        document soon if workers should move.
        """
        if not self.alive or self.cell is None:
            return
        self._beat_s, self.reported, self._moves = self._loop.now, self._report(), self.cell.moves
        if self._pops and self._running is None:
            if self._departs(self.cell):
                return
            next_s = min(next_s, PERIOD_S) if self._moves.chances else next_s
        self._beats += 1
        self._loop.after(next_s, self._beat_due, self._beats)

    def _beat_due(self, number: int) -> None:
        if number == self._beats:
            self._beat()

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

    def _departs(self, cell: BatchSource) -> bool:
        """Whether it moves to another cell now: at most one draw for each document and period."""
        if self._moves.chances:  # Others may have moved by that of the last heartbeat.
            self._moves = cell.moves
        now, moves = self._loop.now, self._moves
        if moves.number == self._decided or now - self._decided_s < EARLIEST * PERIOD_S:
            return False
        self._decided, self._decided_s = moves.number, now
        chosen = destination(moves.chances, self._random.random())
        if chosen is None:
            return False
        self._stop_popping()
        self.cell = None
        cell.departs(self, chosen)
        return True

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
        run_ms = self._costs.run_ms(len(batch.requests), batch.words) * self._slower
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
        if self._loop.now - self._beat_s >= BEAT_S / 2:  # With the end of the batch.
            self._beat()
        self._running = None
        self.service.record(len(batch.requests), self._run_ms)
        self.served.ended(self._loop.now, len(batch.requests))
        batch.cell.finished(batch, self._run_ms)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._start(waiting, 0.0, has_backlog=True)
        elif not self._pops:
            self.pop()

    def stop_counting(self) -> None:
        """The scenario ends now; what still runs is not counted where that matters."""

    def change_speed(self, slower: float) -> None:
        """Batches that begin from here on take so many times as long as by the costs."""
        self._slower = slower

    def lose(self) -> None:
        """The GPU is lost, with its batches."""
        self.alive = False
        self._stop_popping()
        batches = (self._running, self._waiting)
        self._running = self._waiting = None
        for batch in batches:
            if batch is not None:
                batch.cell.lost(batch)
