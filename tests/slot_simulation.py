"""Engines with continuous batching in virtual time, with the limits of the gateway: `capacity_simulation` with slots.

All running sequences get a token at each step, which takes A + B x running ms. The workers' measurements (`SlotUsage`) are the
product's.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from capacity_simulation import Simulation
from gpu_pool.worker.slot_usage import SlotStart, SlotUsage
from scheduler.protocol.pool_view import WorkerView

Lengths = Callable[[random.Random], int]
"""Draws the tokens of an answer."""


def lognormal(mean: float, sigma: float) -> Lengths:
    """Lengths with this mean; `sigma`: the standard deviation of the logarithm."""
    return lambda chance: max(1, round(mean * chance.lognormvariate(-sigma * sigma / 2, sigma)))


def mixed(short: int, long: int, part_long: float) -> Lengths:
    """Two lengths."""
    return lambda chance: long if chance.random() < part_long else short


@dataclass
class Engine:
    """One worker. `slots` by time; `step_ms` and `item_ms`: A and B by time."""

    lengths: Lengths
    step_ms: Callable[[float], float] = lambda _: 12.0
    item_ms: float = 0.15
    slots: Callable[[float], int] = lambda _: 64
    seed: int = 1
    usage: SlotUsage = field(default_factory=SlotUsage)
    costs_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._running: list[tuple[int, SlotStart]] = []  # The step of the last token, and the start.
        self._steps = 0
        self._at_s = 0.0

    def true_rps(self, now: float = 0.0) -> float:
        """Requests/s with all slots in use."""
        slots, chance = self.slots(now), random.Random(5)
        mean = sum(self.lengths(chance) for _ in range(50_000)) / 50_000
        return 1000 * slots / (mean * (self.step_ms(now) + self.item_ms * slots))

    @property
    def size(self) -> int:
        return len(self._running)

    def start(self, now: float) -> None:
        start = self.usage.start(max(now, self._at_s))
        heapq.heappush(self._running, (self._steps + self.lengths(self._chance), start))

    def advance(self, now: float) -> int:
        """Run steps until `now`. Returns the number of requests that ended."""
        ended = 0
        while self._running:
            ends_s = self._at_s + (self.step_ms(self._at_s) + self.item_ms * len(self._running)) / 1000
            if ends_s > now:
                return ended
            self._at_s, self._steps = ends_s, self._steps + 1
            while self._running and self._running[0][0] <= self._steps:
                _, start = heapq.heappop(self._running)
                self.costs_ms.append(self.usage.end(self._at_s, start, self.slots(now)))
                ended += 1
        self._at_s = now
        return ended

    def view(self, name: str, now: float) -> WorkerView:
        usage, slots = self.usage, self.slots(now)
        mean_ms, recent = usage.mean_ms(now), usage.recent_running(now)
        return WorkerView(
            name,
            "busy",
            min(1.0, recent / slots),
            self.size,
            age_ms=0.0,
            healthy=True,
            rps=1000 * slots / mean_ms if mean_ms else 0.0,
            service_p95_ms=2 * mean_ms,
            backend="simulated",
            model_version="1",
            base_ms=mean_ms,
            seen_batch=usage.mean_running(now),
            width=slots,
            fresh_batch=recent,
            served_rps=usage.served_rps(),
            slots=slots,
        )


class SlotSimulation(Simulation):
    """Requests arrive at `offered_rps`; a free slot is filled at the next step of 5 ms."""

    def __init__(self, engines: Sequence[Engine], offered_rps: Callable[[float], float], **options: float) -> None:
        super().__init__([], offered_rps, **options)  # type: ignore[arg-type]
        self.engines = engines
        self.factors: list[float] = []

    def _finish(self, now: float, counts: list[int]) -> None:
        counts[2] += sum(engine.advance(now) for engine in self.engines)

    def _start(self, now: float, counts: list[int]) -> None:
        while self._queue and now - self._queue[0] > self._deadline_s:
            self._queue.popleft()
            counts[3] += 1
        while self._queue:
            engine = max(self.engines, key=lambda each: each.slots(now) - each.size)
            if engine.size >= engine.slots(now):
                return
            self._queue.popleft()
            engine.start(now)

    def _views(self, now: float) -> list[WorkerView]:
        return [engine.view(f"w{i}", now) for i, engine in enumerate(self.engines)]
