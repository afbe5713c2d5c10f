"""A simulated engine with continuous batching in virtual time, with workers that learn their slots, and without any.

An engine makes a step of `base_s + item_s x running` seconds; every running sequence gets a token by each step, and
waiting ones join at the beginning of a step. Clients send the next request when the last one was answered.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpu_pool.backends.openai_endpoint.call_times import Call
from gpu_pool.backends.openai_endpoint.engine_load import EngineLoad
from gpu_pool.backends.openai_endpoint.slots import SlotPolicy

TICK_S = 0.25
DELAY_S = 0.004
"""From a free slot to the request's arrival in the engine."""


@dataclass(eq=False)
class Request:
    """One request of a client."""

    tokens: int
    streamed: bool
    left: int = 0
    refused: bool = False
    withdrawn: bool = False
    worker: "Worker | None" = None
    call: Call | None = None


@dataclass
class Engine:
    """`limit`: sequences at a time; `refuses_above`: requests in all, beyond which it answers 429."""

    base_s: float = 0.012
    item_s: float = 0.00015
    limit: int = 64
    slowness: float = 1.0
    refuses_above: int = 1 << 30
    metrics_every: int = 1
    """Steps between two updates of the metrics."""
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    steps: int = 0
    seen: tuple[int, int] = (0, 0)

    def load(self) -> EngineLoad:
        """The metrics."""
        running, waiting = self.seen if self.metrics_every > 1 else (len(self.running), len(self.waiting))
        return EngineLoad(running, waiting, source="vLLM")


@dataclass(eq=False)
class Worker:
    """One worker with its policy."""

    policy: SlotPolicy
    calls: dict[Request, None] = field(default_factory=dict)


@dataclass
class Sample:
    """The state at one tick."""

    at: float
    counts: list[int]
    running: int
    waiting: int
    tokens: int
    limit: int


class Simulation:
    """`workers`: none for clients that use the engine directly."""

    def __init__(
        self,
        engine: Engine,
        *,
        clients: int,
        workers: int = 1,
        streamed: float = 0.0,
        metrics: bool = True,
        seed: int = 1,
        lengths: Callable[[random.Random], int] | None = None,
        tpot_ms: float | None = None,
        items: bool = False,
        withdraws: bool = True,
    ) -> None:
        self.engine = engine
        self.workers = [Worker(SlotPolicy(tpot_ms=tpot_ms, items=items)) for _ in range(workers)]
        self._random = random.Random(seed)  # noqa: S311 - a simulation
        self._lengths = lengths or lognormal
        self._streamed = streamed
        self._metrics = metrics
        self._withdraws = withdraws
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = 0
        self._stepping = False
        self.now = 0.0
        self.tokens = 0
        self.refused = 0
        self.withdrawn = 0
        self.samples: list[Sample] = []
        self.queue: deque[Request] = deque()
        for _ in range(clients):
            self._new()
        self._at(0.0, self._fill)
        self._at(TICK_S, self._tick)
        for place, worker in enumerate(self.workers):
            self._at(TICK_S * (1 + place / max(1, workers)), lambda worker=worker: self._worker_tick(worker))

    def at(self, when: float, change: Callable[[Engine], Any]) -> None:
        """Change the engine at that time."""
        self._at(when, lambda: change(self.engine))

    def run(self, until: float) -> "Simulation":
        """Go on until that time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until
        return self

    def _at(self, when: float, act: Callable[[], Any]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, act))

    def _new(self) -> None:
        tokens = self._lengths(self._random)
        self.queue.append(Request(tokens, self._random.random() < self._streamed, tokens))

    def _fill(self) -> None:
        """Give queued requests to the workers with the most free slots."""
        while self.queue:
            if not self.workers:
                self._at(self.now + DELAY_S, lambda request=self.queue.popleft(): self._arrive(request))
                continue
            worker = max(self.workers, key=lambda worker: worker.policy.count - len(worker.calls))
            if worker.policy.count <= len(worker.calls):
                return
            request = self.queue.popleft()
            request.worker, request.call = worker, worker.policy.start(self.now, streamed=request.streamed)
            worker.calls[request] = None
            self._at(self.now + DELAY_S, lambda request=request: self._arrive(request))

    def _arrive(self, request: Request) -> None:
        if self.workers and request.call is None:
            return  # Withdrawn before.
        engine = self.engine
        if len(engine.running) + len(engine.waiting) >= engine.refuses_above:
            self.refused += 1
            self._leave(request, refused=True)
            return
        engine.waiting.append(request)
        if not self._stepping:
            self._step()

    def _leave(self, request: Request, *, refused: bool = False) -> None:
        assert request.worker is not None
        assert request.call is not None
        del request.worker.calls[request]
        if refused:
            request.worker.policy.refuse(request.call, self.now)
        else:
            request.worker.policy.leave(request.call)
        request.call = None
        self.queue.appendleft(request)
        self._at(self.now + DELAY_S, self._fill)

    def _step(self) -> None:
        engine = self.engine
        while engine.waiting and len(engine.running) < engine.limit:
            engine.running.append(engine.waiting.popleft())
        self._stepping = bool(engine.running)
        if self._stepping:
            length = (engine.base_s + engine.item_s * len(engine.running)) * engine.slowness
            self._at(self.now + length, self._stepped)
        engine.steps += 1
        if engine.steps % engine.metrics_every == 0:
            engine.seen = len(engine.running), len(engine.waiting)

    def _stepped(self) -> None:
        engine, still = self.engine, []
        for request in engine.running:
            self.tokens += 1
            request.left -= 1
            if request.worker is not None and request.streamed and request.call is not None:
                request.worker.policy.output(request.call, self.now)
            if request.left:
                still.append(request)
                continue
            if request.worker is not None and request.call is not None:
                request.worker.policy.end(request.call, self.now, request.tokens)
                del request.worker.calls[request]
            self._new()
        engine.running = still
        self._fill()
        self._step()

    def _worker_tick(self, worker: Worker) -> None:
        worker.policy.tick(self.now, self.engine.load() if self._metrics else None)
        if self._withdraws:
            self._withdraw(worker, worker.policy.excess)
        self._fill()
        self._at(self.now + TICK_S, lambda: self._worker_tick(worker))

    def _withdraw(self, worker: Worker, excess: int) -> None:
        for request in list(reversed(worker.calls)):
            if excess <= 0:
                return
            if request.withdrawn or (request.call is not None and request.call.events):
                continue
            excess -= 1
            self.withdrawn += 1
            request.withdrawn, request.left = True, request.tokens
            if request in self.engine.waiting:
                self.engine.waiting.remove(request)
            elif request in self.engine.running:
                self.engine.running.remove(request)
            self._leave(request)

    def _tick(self) -> None:
        engine = self.engine
        counts = [worker.policy.count for worker in self.workers]
        self.samples.append(
            Sample(self.now, counts, len(engine.running), len(engine.waiting), self.tokens, engine.limit)
        )
        self._at(self.now + TICK_S, self._tick)


def lognormal(source: random.Random) -> int:
    """Output lengths with a mean of 80 tokens and sigma 1."""
    return max(1, round(source.lognormvariate(3.882, 1.0)))


def rate(simulation: Simulation, since: float, until: float) -> float:
    """Tokens/s of the engine between two times."""
    seen = [sample for sample in simulation.samples if since <= sample.at <= until]
    return (seen[-1].tokens - seen[0].tokens) / (seen[-1].at - seen[0].at)


def time_to_rate(simulation: Simulation, wanted: float, since: float = 0.0, within_s: float = 1.0) -> float:
    """Seconds from `since` until the rate over the next `within_s` first reaches the wanted one; infinite if never."""
    ticks = round(within_s / TICK_S)
    samples = simulation.samples
    for first, last in zip(samples, samples[ticks:], strict=False):
        if first.at >= since and (last.tokens - first.tokens) / (last.at - first.at) >= wanted:
            return first.at - since
    return float("inf")


def longest_queue_s(simulation: Simulation, since: float, until: float, share: float = 0.1) -> float:
    """The longest time for which more than a part of the engine's sequences waited without interruption."""
    longest = now = 0.0
    for sample in simulation.samples:
        if since <= sample.at <= until:
            now = now + TICK_S if sample.waiting > max(2.0, share * sample.limit) else 0.0
            longest = max(longest, now)
    return longest


def swing(simulation: Simulation, since: float, until: float) -> float:
    """The largest deviation of the slots of all workers from their mean, as a part of it."""
    totals = [sum(sample.counts) for sample in simulation.samples if since <= sample.at <= until]
    mean = sum(totals) / len(totals)
    return max(abs(total - mean) for total in totals) / mean
