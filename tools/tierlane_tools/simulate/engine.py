"""An engine with continuous batching in virtual time: all running sequences get a word at each step, and join and leave between steps.

A step takes `step_ms` + running sequences x `step_item_ms`. Only steps before or after which something changes are events.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from itertools import count

from tierlane_tools.simulate.events import EventLoop
from tierlane_tools.simulate.fair_queue import QueuedRequest
from tierlane_tools.simulate.scenario import Costs


class EngineSequence:
    """One request in the engine. `first_s`: when its first word is there, infinite while it waits."""

    __slots__ = ("first_s", "request", "words")

    def __init__(self, request: QueuedRequest) -> None:
        self.request = request
        self.words = max(1, round(request.words))
        self.first_s = math.inf


class SimulatedEngine:
    """Runs at most `costs.slots` sequences; others wait in order of arrival. `ended` is called for each that has all its words."""

    def __init__(self, loop: EventLoop, costs: Costs, ended: Callable[[EngineSequence], None]) -> None:
        self._loop = loop
        self._costs = costs
        self._ended = ended
        self._active: list[tuple[int, int, EngineSequence]] = []  # By the number of the last step.
        self._numbers = count()
        self._waiting: deque[EngineSequence] = deque()
        self._steps = 0  # That had ended when the present sequences began to run together, at `_since_s`.
        self._since_s = self._step_s = 0.0
        self._next_s = math.inf
        self._version = 0
        self.slower = 1.0
        """A factor on the time of a step. Set by `change_speed`."""

    @property
    def running(self) -> int:
        """Running sequences."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    def add(self, sequence: EngineSequence) -> None:
        """A request arrives. It begins with the next step, if a slot is free."""
        self._waiting.append(sequence)
        if not self._active:
            self._begin()
        elif len(self._active) < self._costs.slots:
            self._look_after_step()

    def withdraw(self, sequence: EngineSequence) -> None:
        """The client of a request without words leaves: a running one frees its slot after the present step."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        self._active = [entry for entry in self._active if entry[2] is not sequence]
        heapq.heapify(self._active)
        self._look_after_step()

    def change_speed(self, slower: float) -> None:
        """Each step from the next one on takes `slower` times as long as by the costs."""
        self.slower = slower
        if self._active:
            self._look_after_step()

    def stop(self) -> None:
        """The process ends, with all sequences."""
        self._version += 1
        self._active, self._next_s = [], math.inf
        self._waiting.clear()

    def _look_after_step(self) -> None:
        """Something changes at the end of the present step."""
        passed = math.floor((self._loop.now - self._since_s) / self._step_s) + 1
        self._look_at(passed)

    def _look_at(self, step: int) -> None:
        """Go on at the end of this step, counted from `_since_s`, unless that is later than planned."""
        at_s = self._since_s + step * self._step_s
        if at_s < self._next_s:
            self._version += 1
            self._next_s = at_s
            self._loop.at(at_s, self._between_steps, step, self._version)

    def _between_steps(self, step: int, version: int) -> None:
        if version != self._version:
            return
        self._steps += step
        ended = []
        while self._active and self._active[0][0] <= self._steps:
            ended.append(heapq.heappop(self._active)[2])
        self._begin()
        for sequence in ended:
            self._ended(sequence)

    def _begin(self) -> None:
        """Begin a step: waiting sequences take the free slots."""
        now, joined = self._loop.now, []
        while self._waiting and len(self._active) < self._costs.slots:
            sequence = self._waiting.popleft()
            heapq.heappush(self._active, (self._steps + sequence.words, next(self._numbers), sequence))
            joined.append(sequence)
        self._since_s, self._next_s = now, math.inf
        self._step_s = (self._costs.step_ms + self._costs.step_item_ms * len(self._active)) * self.slower / 1000
        for sequence in joined:
            sequence.first_s = sequence.request.first_s = now + self._step_s
        if self._active:
            self._look_at(self._active[0][0] - self._steps)
