"""A worker with slots in virtual time, before an engine with continuous batching.

The use of the slots is measured by the real `SlotUsage`; with `learn_slots`, the real `SlotPolicy` finds their number from what the
engine reports.
"""

from collections.abc import Sequence
from random import Random

from gpu_pool.backends.openai_endpoint.call_times import Call
from gpu_pool.backends.openai_endpoint.engine_load import EngineLoad
from gpu_pool.backends.openai_endpoint.serving import BUSY_TICK_S, IDLE_TICK_S
from gpu_pool.backends.openai_endpoint.slots import SlotPolicy
from gpu_pool.worker.slot_usage import SlotStart, SlotUsage
from scheduler.protocol.pool_view import WorkerView
from tierlane_tools.simulate.engine import EngineSequence, SimulatedEngine
from tierlane_tools.simulate.events import EventLoop
from tierlane_tools.simulate.scenario import Costs
from tierlane_tools.simulate.worker import BatchSource, SimulatedBatch, SimulatedWorker

P95 = 3.0
"""The reported p95 as a multiple of the mean: that of an exponential distribution."""
SOURCE = "vLLM"


class _SlotUse:
    """One request in a slot. `is_sent`: the engine has it; then it is also a `call` of the policy, if there is one."""

    __slots__ = ("batch", "call", "is_sent", "start")

    def __init__(self, batch: SimulatedBatch, start: SlotStart) -> None:
        self.batch = batch
        self.start = start
        self.is_sent = False
        self.call: Call | None = None


class SlottedWorker(SimulatedWorker):
    """One engine and its worker; a batch has one request."""

    def __init__(self, name: str, loop: EventLoop, costs: Costs, random: Random) -> None:
        super().__init__(name, loop, costs, random)
        self._usage = SlotUsage()
        self._engine = SimulatedEngine(loop, costs, self._has_ended)
        self._policy = SlotPolicy() if costs.learn_slots else None
        self._runs: dict[EngineSequence, _SlotUse] = {}  # In order of their start.
        self._last: SlotStart | None = None  # Of a request that would begin at the end of the scenario.
        self._ticks = 0
        self.killed = False

    @property
    def slots(self) -> int:
        """Requests that it runs at a time."""
        if self.killed or not self.alive:
            return 0
        return self._policy.count if self._policy else self._costs.slots

    @property
    def free(self) -> int:
        """Free slots."""
        return max(0, self.slots - len(self._runs))

    def join(self, cell: BatchSource) -> None:
        """Serve a cell."""
        self.counted = (0, 0)
        super().join(cell)
        self._count()
        if self._policy:
            self._tick(self._ticks)

    def pop(self) -> None:
        """Wait for a request while a slot is free."""
        if self.free > 0:
            super().pop()

    def take(self, batch: SimulatedBatch) -> None:
        """A request for a worker that waits for one; the number of slots may have fallen meanwhile."""
        if self.free > 0:
            super().take(batch)
        else:
            self._pops = False
            batch.cell.ready.appendleft(batch)

    def _count(self) -> None:
        """Tell the cell the slots, if they have changed."""
        if self.cell is not None:
            before, self.counted = self.counted, (self.slots, self.free)
            self.cell.count_slots(self.counted[0] - before[0], self.counted[1] - before[1])

    def _report(self) -> WorkerView:
        now, slots, usage = self._loop.now, self.slots, self._usage
        mean_ms, recent = usage.mean_ms(now), usage.recent_running(now)
        return WorkerView(
            self.name,
            "busy" if self._runs else "ready",
            min(1.0, recent / max(1, slots)),
            len(self._runs),
            age_ms=0.0,
            healthy=not self.killed,
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
            sequence = EngineSequence(batch.requests[0])
            if not self._runs and self._policy:
                self._ticks += 1
                self._loop.after(0.0, self._tick, self._ticks)
            self._runs[sequence] = _SlotUse(batch, self._usage.start(self._loop.now))
            self._count()
            self._loop.after(self._costs.dispatch_ms / 1000, self._send, sequence)
        self.pop()

    def _send(self, sequence: EngineSequence) -> None:
        run = self._runs.get(sequence)
        if run is None:  # Withdrawn or lost before.
            return
        sequence.request.started_s = self._loop.now
        run.is_sent = True
        if self._policy:
            run.call = self._policy.start(self._loop.now, streamed=True)
        self._engine.add(sequence)

    def _has_ended(self, sequence: EngineSequence) -> None:
        now, run = self._loop.now, self._runs.pop(sequence)
        cost_ms = self._usage.end(now, run.start, self.slots)
        if self._last is not None:
            cost_ms = 1000 * max(0.0, self._last.part_s - run.start.part_s)
        if self._policy and run.call:
            self._policy.output(run.call, sequence.first_s)
            self._policy.end(run.call, now, sequence.words)
        self._count()
        run.batch.cell.started(run.batch, cost_ms / 1000)  # Its part of the engine is known only now.
        run.batch.cell.finished(run.batch, cost_ms)
        self.pop()

    def _tick(self, number: int) -> None:
        """Read the engine's load and adapt the number of slots, as `gpu_pool/backends/openai_endpoint/serving.py`."""
        policy = self._policy
        if number != self._ticks or policy is None or self.killed or not self.alive:
            return
        self._ticks += 1
        self._loop.after(BUSY_TICK_S if self._runs else IDLE_TICK_S, self._tick, self._ticks)
        before = self.counted[1]
        policy.tick(self._loop.now, EngineLoad(self._engine.running, self._engine.waiting, source=SOURCE))
        self._count()
        if policy.excess:
            self._give_back(self._without_words()[: policy.excess])
        self.pop()
        if self.cell is not None and self.counted[1] > before:
            self.cell.more_slots()

    def withdraw(self, number: int, tiers: Sequence[str]) -> None:
        """Return up to so many requests of these tiers that have no words yet, those of the first tiers first; each at most once."""
        runs = [each for each in self._without_words() if each.request.attempts == 0 and not each.request.withdrawn]
        tier_of = {each: self._runs[each].batch.tier for each in runs}
        allowed = sorted((each for each in runs if tier_of[each] in tiers), key=lambda each: tiers.index(tier_of[each]))
        for each in allowed[:number]:
            each.request.withdrawn = True
        self._give_back(allowed[:number])

    def _without_words(self) -> list[EngineSequence]:
        """The youngest first."""
        return [each for each in reversed(self._runs) if each.first_s > self._loop.now]

    def _give_back(self, sequences: Sequence[EngineSequence]) -> None:
        for sequence in sequences:
            run = self._leave(sequence)
            if run.is_sent:
                self._engine.withdraw(sequence)
            run.batch.cell.returned(run.batch)

    def _leave(self, sequence: EngineSequence) -> _SlotUse:
        """A request leaves without its end."""
        run = self._runs.pop(sequence)
        self._usage.leave(self._loop.now)
        if self._policy and run.call:
            self._policy.leave(run.call)
        self._count()
        return run

    def stop_counting(self) -> None:
        """From here on the engine is not filled again, and its time is not charged: the last requests have it alone."""
        self._last = self._usage.start(self._loop.now)
        self._usage.leave(self._loop.now)

    def change_speed(self, slower: float) -> None:
        """The engine becomes so many times slower than at the start."""
        self._engine.change_speed(slower)

    def kill(self) -> None:
        """The engine ends, its worker stays: streams that have begun break off, other requests run again."""
        self.killed = True
        self._stop_popping()
        self._engine.stop()
        for sequence in reversed(list(self._runs)):
            batch = self._leave(sequence).batch
            if sequence.first_s <= self._loop.now:
                batch.cell.broken(batch)
            else:
                sequence.request.attempts += 1
                batch.cell.returned(batch)
        self._count()
        self._beat()

    def lose(self) -> None:
        """The worker is lost, with its engine and requests."""
        super().lose()
        self._engine.stop()
        runs, self._runs = self._runs, {}
        self._count()
        for run in runs.values():
            run.batch.cell.lost(run.batch)
