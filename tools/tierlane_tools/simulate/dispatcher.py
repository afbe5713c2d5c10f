"""The turns of `scheduler/batching/dispatcher.py` in virtual time, on the queues of a cell, with the policies of schedulers."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scheduler.batching.arrival_rate import ArrivalRate
from scheduler.batching.decision import Decision
from scheduler.batching.dispatcher import MAX_SLEEP_S, REFUSED_PAUSE_S, STANDBY_S
from scheduler.batching.policy import plan
from scheduler.batching.service import UNKNOWN, Service
from scheduler.batching.slot_policy import fill, kept_free
from scheduler.batching.snapshot import PoolSnapshot, TierQueue
from scheduler.batching.tier_policy import BatchPolicy
from scheduler.batching.withdrawal import withdrawal
from scheduler.protocol.pool_view import SlotView
from scheduler.protocol.wake_condition import FIRST_IDLE, NEVER, WakeCondition
from tierlane_tools.simulate.events import EventLoop
from tierlane_tools.simulate.fair_queue import FairQueue
from tierlane_tools.simulate.slots import SlottedWorker

if TYPE_CHECKING:
    from tierlane_tools.simulate.cell import SimulatedCell

SHORTEST_SLEEP_S = 0.001  # Less would be a rounding error.
MOST_READY = 1_000_000  # Free slots bound what is ready.


class CellDispatcher:
    """The dispatcher of one cell."""

    def __init__(self, cell: "SimulatedCell", loop: EventLoop, policy: BatchPolicy) -> None:
        self._cell = cell
        self._loop = loop
        self.policy = policy
        self.service: Service = UNKNOWN
        self._arrivals = ArrivalRate()
        self._credit: Mapping[str, float] = {}
        self._depth_left = 0
        self._due_s = -math.inf
        self._withdrawals = 0
        self._withdrawn_s = -math.inf
        self._condition: WakeCondition = WakeCondition(1)
        self._timer = 0
        self._in_turn = False
        self.stopped = False

    def admitted(self, depth: int, *, urgent: bool) -> None:
        """A request was queued."""
        if urgent or 0 < self._condition.depth <= depth:
            self.turn()

    def worker_changed(self, is_first_idle: bool) -> None:  # noqa: FBT001  # An argument of an event.
        """A worker claimed a batch, or finished one. `is_first_idle`: it is the only idle one now, or no batch runs."""
        ready = len(self._cell.ready)
        if self._condition.ready >= ready or (self._condition.ready == FIRST_IDLE and is_first_idle):
            self.turn()

    def turn(self) -> None:
        """Form all batches that should leave now, and set the wake condition and the timer."""
        if self._in_turn or self.stopped:
            return
        self._in_turn = True
        try:
            wait_s = self._form_due()
        finally:
            self._in_turn = False
        self._timer += 1
        self._loop.after(wait_s, self._on_timer, self._timer)

    def _on_timer(self, number: int) -> None:
        if number == self._timer:
            self.turn()

    def _form_due(self) -> float:
        """Form batches; returns the seconds until the next turn."""
        if self._cell.has_slots:
            return self._fill_slots()
        while True:
            decisions = self._decide()
            decision = decisions[0]
            if not decision.picks:
                self._condition = decision.condition
                if decision.wait_ms is None:
                    return STANDBY_S if decision.condition.ready == FIRST_IDLE else MAX_SLEEP_S
                return max(1e-6, decision.wait_ms / 1000)
            self._condition = NEVER
            before = self._cell.depth
            now = self._loop.now
            formed = sum(self._cell.form(each.picks, decision.ready_limit) for each in decisions)
            self._credit = decisions[-1].credit
            self._due_s = now - decisions[-1].since_ms / 1000
            self._depth_left -= before - self._cell.depth
            if not formed and self._cell.depth >= before:
                self._condition = WakeCondition(0, decision.ready_limit - 1)
                return REFUSED_PAUSE_S

    def _fill_slots(self) -> float:
        """Fill the free slots. Returns the seconds until the next turn."""
        cell = self._cell
        self._condition = WakeCondition(1, MOST_READY)
        highest = cell.queues[self.policy.order[0].name] if self.policy.tiers else None
        while before := cell.depth:
            free = cell.free_slots - len(cell.ready)
            kept = 0 if highest and highest.depth else kept_free(SlotView(free, cell.slots, free), self.policy)
            if free <= kept:
                break
            decisions = fill(self._snapshot(), self.policy, self._credit)
            for decision in decisions:
                for tier, places in decision.picks:
                    # One by one: which worker has how many free slots is not known here.
                    for _ in range(places):
                        cell.form([(tier, 1)], MOST_READY)
            self._credit = decisions[-1].credit
            if cell.depth >= before:
                break
        return self._withdraw() if highest and highest.depth else MAX_SLEEP_S

    def _withdraw(self) -> float:
        """Withdraw runs of lower tiers if the highest one would wait too long for a slot."""
        cell, now = self._cell, self._loop.now
        wanted = withdrawal(self._snapshot(), self.policy, (now - self._withdrawn_s) * 1000)
        if wanted is None:
            return MAX_SLEEP_S
        workers = [each for each in cell.workers if isinstance(each, SlottedWorker) and each.slots]
        if wanted.runs and workers:
            self._withdrawals += 1
            self._withdrawn_s = now
            self._loop.after(0.0, workers[self._withdrawals % len(workers)].withdraw, wanted.runs, wanted.queues)
        return min(MAX_SLEEP_S, max(SHORTEST_SLEEP_S, wanted.wait_ms / 1000))

    def _decide(self) -> list[Decision]:
        cell, now = self._cell, self._loop.now
        depth = cell.depth
        self._arrivals.record(max(0, depth - self._depth_left), now)
        self._depth_left = depth
        return plan(self._snapshot(), self.policy, self._credit)

    def _snapshot(self) -> PoolSnapshot:
        cell, now = self._cell, self._loop.now
        free = max(0, cell.free_slots - len(cell.ready))
        return PoolSnapshot(
            tiers={name: TierQueue(queue.depth, age_ms(queue, now)) for name, queue in cell.queues.items()},
            ready_batches=len(cell.ready),
            leased_batches=cell.leased,
            workers=cell.healthy,
            arrivals_per_s=self._arrivals.per_second(now),
            service=self.service,
            since_ms=(now - self._due_s) * 1000,
            since_formed_ms=(now - self._cell.formed_s) * 1000,
            quiet=[name for name, queue in cell.queues.items() if queue.quiet and queue.in_backlogs],
            slots=SlotView(free, cell.slots, free) if cell.has_slots else None,
        )


def age_ms(queue: FairQueue, now: float) -> float:
    """The wait of the oldest request of a queue."""
    oldest = queue.oldest_s()
    return 0.0 if oldest is None else (now - oldest) * 1000
