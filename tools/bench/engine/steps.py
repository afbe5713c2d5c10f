"""The scheduler of the engine, without I/O: a sequence joins and leaves at every step.

All running sequences get one token a step, and a step takes `step_ms + sequence_ms x running`. A sequence that arrives
while all slots are taken waits, in the order of arrival or of its priority. Times are monotonic seconds.
"""

import heapq
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass
class Pace:
    """How fast the engine is; may change while it runs.

    `slots`: the most running sequences. `factor` multiplies the time of a step. `step_as_if`: a step takes the time of at
    least this many running sequences. `priority`: waiting sequences are ordered by priority, the lower first.
    """

    step_ms: float = 12.0
    sequence_ms: float = 0.15
    slots: int = 64
    factor: float = 1.0
    step_as_if: int = 0
    priority: bool = False

    def duration_s(self, running: int) -> float:
        """Seconds of a step with this many running sequences."""
        return (self.step_ms + self.sequence_ms * max(running, self.step_as_if)) * self.factor / 1000

    def tokens_per_s(self, running: int) -> float:
        """Tokens per second while this many sequences run."""
        return running / self.duration_s(running)


@dataclass(slots=True, eq=False)
class Sequence:
    """One output of `length` tokens. `call` is its owner; `started` once it has a slot, `gone` after the client left.
    `reset_at`: the connection is reset after this many tokens, 0 for never.
    """

    call: Any
    length: int
    prompt_tokens: int
    index: int = 0
    reset_at: int = 0
    done: int = 0
    started: bool = False
    gone: bool = False


@dataclass
class Totals:
    """Counts since the start. `wasted_tokens` were generated for sequences whose client left."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    wasted_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    refused: dict[int, int] = field(default_factory=dict)


class Sample(NamedTuple):
    """The state after the admission of a step: monotonic seconds, sequences, and tokens generated since the start."""

    at_s: float
    running: int
    waiting: int
    generated_tokens: int


class Scheduler:
    """Running and waiting sequences. `begin_step` and `end_step` are called in turn."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.totals = Totals()
        self.running: list[Sequence] = []
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._arrivals = 0
        self._left_waiting = 0

    @property
    def waiting(self) -> int:
        """The number of waiting sequences whose client is still there."""
        return len(self._waiting) - self._left_waiting

    @property
    def used_tokens(self) -> int:
        """Tokens of prompts and outputs of all running sequences."""
        return sum(sequence.prompt_tokens + sequence.done for sequence in self.running)

    def add(self, sequence: Sequence, priority: int = 0) -> None:
        """A sequence waits for a slot."""
        self._arrivals += 1
        heapq.heappush(self._waiting, (priority if self.pace.priority else 0, self._arrivals, sequence))

    def abort(self, sequence: Sequence) -> None:
        """The client left: a running sequence frees its slot at the next step, a waiting one never runs."""
        if sequence.gone or sequence.done == sequence.length:
            return
        sequence.gone = True
        self.totals.aborted += 1
        self.totals.wasted_tokens += sequence.done
        self._left_waiting += not sequence.started

    def begin_step(self) -> int:
        """Fill free slots; returns the number of running sequences. 0: nothing to do."""
        self.running = [sequence for sequence in self.running if not sequence.gone]
        while self._waiting and (len(self.running) < self.pace.slots or self._waiting[0][2].gone):
            _, _, sequence = heapq.heappop(self._waiting)
            if sequence.gone:
                self._left_waiting -= 1
                continue
            sequence.started = True
            self.totals.prompt_tokens += sequence.prompt_tokens
            self.running.append(sequence)
        return len(self.running)

    def end_step(self) -> list[Sequence]:
        """Give each running sequence one token; returns those that got one, the finished ones included."""
        stepped = [sequence for sequence in self.running if not sequence.gone]
        for sequence in stepped:
            sequence.done += 1
        self.running = [sequence for sequence in stepped if sequence.done < sequence.length]
        self.totals.generated_tokens += len(stepped)
        self.totals.finished += len(stepped) - len(self.running)
        return stepped
