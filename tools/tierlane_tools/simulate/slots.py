"""A worker with slots in virtual time: an engine with continuous batching, in which all running requests get a word at each step.

A step takes `step_ms` + running requests x `step_item_ms`. The use of the slots is measured by the real `SlotUsage`.
"""

import heapq
from itertools import count
from random import Random

from gpu_pool.worker.slot_usage import SlotStart, SlotUsage
from scheduler.protocol.pool_view import WorkerView
from tierlane_tools.simulate.events import EventLoop
from tierlane_tools.simulate.scenario import Costs
from tierlane_tools.simulate.worker import SimulatedBatch, SimulatedWorker

P95 = 3.0
"""The reported p95 as a multiple of the mean: that of an exponential distribution."""


class SlottedWorker(SimulatedWorker):
    """One engine; a batch has one request."""

    def __init__(self, name: str, loop: EventLoop, costs: Costs, random: Random) -> None:
        super().__init__(name, loop, costs, random)
        self._usage = SlotUsage()
        self._active: list[tuple[float, int, SimulatedBatch, SlotStart]] = []  # By the number of steps at the end.
        self._numbers = count()
        self._steps = 0.0  # Of the engine until `_stepped_s`.
        self._stepped_s = 0.0
        self._version = 0

    @property
    def free(self) -> int:
        """Free slots."""
        return self._costs.slots - len(self._active) if self.alive else 0

    def pop(self) -> None:
        """Wait for a request while a slot is free."""
        if self.free > 0:
            super().pop()

    def _report(self) -> WorkerView:
        now, slots, usage = self._loop.now, self._costs.slots, self._usage
        mean_ms, recent = usage.mean_ms(now), usage.recent_running(now)
        return WorkerView(
            self.name,
            "busy" if self._active else "ready",
            min(1.0, recent / slots),
            len(self._active),
            age_ms=0.0,
            healthy=True,
            rps=1000 * slots / mean_ms if mean_ms else 0.0,
            service_p95_ms=P95 * mean_ms,
            backend="simulated",
            model_version="1",
            base_ms=mean_ms,
            seen_batch=usage.mean_running(now),
            width=slots,
            fresh_batch=recent,
            served_rps=usage.served_rps(),
            slots=slots,
            slots_source="scenario",
        )

    def _claim(self, batch: SimulatedBatch) -> None:
        if self.cell is not None and self.cell.claimed(batch):
            self._loop.after(self._costs.dispatch_ms / 1000, self._begins, batch)
            self._advance()
            start = self._usage.start(self._loop.now)
            heapq.heappush(self._active, (self._steps + batch.words, next(self._numbers), batch, start))
            for request in batch.requests:
                request.first_s = self._loop.now + self._step_s()
            self._schedule()
        self.pop()

    def _begins(self, batch: SimulatedBatch) -> None:
        for request in batch.requests:
            request.started_s = self._loop.now

    def _step_s(self) -> float:
        return (self._costs.step_ms + self._costs.step_item_ms * len(self._active)) / 1000

    def _advance(self) -> None:
        """Count the steps until now."""
        if self._active:
            self._steps += (self._loop.now - self._stepped_s) / self._step_s()
        self._stepped_s = self._loop.now

    def _schedule(self) -> None:
        """The next end, if no request begins before."""
        self._version += 1
        if self._active:
            left_s = max(0.0, self._active[0][0] - self._steps) * self._step_s()
            self._loop.after(left_s, self._next_end, self._version)

    def _next_end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        _, _, batch, start = heapq.heappop(self._active)
        cost_ms = self._usage.end(self._loop.now, start, self._costs.slots)
        batch.cell.started(batch, cost_ms / 1000)  # Its part of the engine is known only now.
        batch.cell.finished(batch, cost_ms)
        self._schedule()
        self.pop()

    def lose(self) -> None:
        """The engine is lost, with its requests."""
        super().lose()
        self._version += 1
        active, self._active = self._active, []
        for _, _, batch, _ in active:
            batch.cell.lost(batch)
