"""How many calls wait in an engine that reports nothing, estimated from the times of the calls. Pure: clocks are arguments.

Streams: an engine starts calls in their order, so those that started after the latest call with output are waiting.
Whole answers: a fit of duration = wait + tokens x time per token over the recent answers gives the wait; the calls
that wait are the calls in flight times their waiting part.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

MEMORY = 20
"""The weight of about this many last answers is that of all."""
LOW_S = 30.0
"""The least of a quantity is that of the last one to two periods of this length."""
LEAST_SPREAD = 0.1
"""With a smaller relative spread of the lengths, wait and time per token cannot be told apart."""
MEAN_GAIN, MARGIN = 0.1, 1.3
"""Weight of a call in the mean time to the first output; factor on this mean when it is taken for unqueued."""
ALIGNMENT_S = 0.01
"""Jitter of the client, on top of the wait of at most one step that every call has."""


@dataclass(eq=False, slots=True)
class Call:
    """One call in flight. Times in seconds; `first` and `last`: its first and last output, 0 before them."""

    started: float
    streamed: bool
    first: float = 0.0
    last: float = 0.0
    events: int = 0


class RecentLow:
    """The least value of the last LOW_S to 2 x LOW_S seconds."""

    def __init__(self) -> None:
        self._before = self._now = math.inf
        self._until = 0.0

    def add(self, value: float, now: float) -> None:
        """Add a value."""
        if now >= self._until:
            self._before, self._now = self._now, math.inf
            self._until = now + LOW_S
        self._now = min(self._now, value)

    @property
    def value(self) -> float:
        """The least value; infinite before the first."""
        return min(self._before, self._now)


class UnqueuedTime:
    """The time to the first output of calls that do not wait in a queue, learnt from all calls.

    It is the least recent one, in seconds or in times per token if that is more now: prefill takes longer in an engine
    with more running sequences.
    """

    def __init__(self) -> None:
        self._seconds = RecentLow()
        self._steps = RecentLow()
        self._mean_s = 0.0
        self._accepted = 0.0

    def add(self, seconds: float, token_s: float, now: float) -> None:
        """The time to the first output of a call, or of several ones, and the present time per token (0: unknown)."""
        self._seconds.add(seconds, now)
        self._mean_s += (seconds - self._mean_s) * (MEAN_GAIN if self._mean_s else 1)
        if token_s:
            self._steps.add(seconds / token_s, now)
            if self._mean_s < self._accepted * token_s / 2:
                self._accepted = self._mean_s / token_s

    def seconds(self, token_s: float) -> float:
        """The time; infinite before the first call."""
        steps = self._steps.value if math.isfinite(self._steps.value) else 0.0
        return max(self._seconds.value, max(steps, self._accepted) * token_s)

    def accept(self, token_s: float) -> None:
        """The present times are those of calls that do not wait."""
        if token_s:
            self._accepted = MARGIN * self._mean_s / token_s


class StreamTimes:
    """First outputs and time between tokens of streams."""

    def __init__(self) -> None:
        self._latest = -math.inf
        self._first = UnqueuedTime()
        self._gap_s = 0.0
        self._gaps = 0
        self._tokens, self._events = 1.0, 1.0
        self._measured_at, self._measured_events, self._all_events = 0.0, 0, 0
        self.token_s = 0.0
        """Seconds between tokens, of the last measured period; 0 before the first."""
        self.firsts = 0
        """First outputs, in all."""
        self.rate = 0.0
        """Events/s of all streams, of about the last second."""

    def output(self, call: Call, now: float) -> None:
        """A part of the output of a call was received."""
        call.events += 1
        self._all_events += 1
        if call.events > 1:
            self._gap_s += now - call.last
            self._gaps += 1
        else:
            call.first = now
            self.firsts += 1
            self._latest = max(self._latest, call.started)
            self._first.add(now - call.started, self.token_s, now)
        call.last = now

    def ended(self, call: Call, tokens: int) -> None:
        """A stream ended with that many tokens, which may be more than its events; 0 if the server does not report them."""
        if tokens and call.events:
            self._tokens = 0.98 * self._tokens + tokens
            self._events = 0.98 * self._events + call.events

    def measure(self, now: float) -> None:
        """Begin a new period of `rate`, and of `token_s` if the present one has enough events."""
        if now > self._measured_at:
            events_s = (self._all_events - self._measured_events) / (now - self._measured_at)
            self.rate += (events_s - self.rate) * min(1.0, now - self._measured_at)
            self._measured_at, self._measured_events = now, self._all_events
        if self._gaps >= 20:
            self.token_s = self._gap_s / self._gaps * self._events / self._tokens
            self._gap_s, self._gaps = 0.0, 0

    @property
    def settling_s(self) -> float:
        """A call without output for longer than this waits; infinite before the first output."""
        return self._first.seconds(self.token_s) + self.token_s + ALIGNMENT_S

    def waiting(self, youngest_first: Iterable[Call], now: float) -> float | None:
        """The waiting calls, of all in flight; None if too few of them are streams."""
        waiting = streams = calls = 0
        passed = False
        limit_s = self.settling_s
        for call in youngest_first:
            calls += 1
            if call.streamed:
                streams += 1
                passed = passed or call.events > 0 or call.started < self._latest
                waiting += not passed and now - call.started > limit_s
        if not streams or 4 * streams < calls or math.isinf(limit_s):
            return None
        return waiting * calls / streams

    def accept(self) -> None:
        """The present time to the first output is no wait."""
        self._first.accept(self.token_s)


class AnswerTimes:
    """Sums over recent answers, each weighted by 1 / tokens: long answers vary more."""

    def __init__(self) -> None:
        self._base = UnqueuedTime()
        self._mean_tokens = 0.0
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """Forget all answers, and ignore those that started before now."""
        self._since = now
        self._recent.clear()
        self.count = self._inverse = self._tokens = self._duration = self._per_token = 0.0

    def ended(self, call: Call, tokens: int, now: float) -> None:
        """An answer was received."""
        if tokens < 1:
            return
        # The first answers of a level are the short ones: the mean length is that of all answers.
        self._mean_tokens += (tokens - self._mean_tokens) * (0.02 if self._mean_tokens else 1)
        if call.started < self._since:
            return
        duration_s = now - call.started
        self._recent.append(duration_s)
        keep = 1 - 1 / MEMORY
        self.count = keep * self.count + 1
        self._inverse = keep * self._inverse + 1 / tokens
        self._tokens = keep * self._tokens + tokens
        self._duration = keep * self._duration + duration_s
        self._per_token = keep * self._per_token + duration_s / tokens

    @property
    def token_s(self) -> float:
        """Seconds of a call for each token, waits included; 0 without answers."""
        return self._duration / self._tokens if self._tokens else 0.0

    @property
    def mean_s(self) -> float:
        """Mean duration of an answer of mean length; 0 without answers."""
        return self.token_s * self._mean_tokens

    def waiting(self, calls: float, now: float) -> float | None:
        """The waiting ones of `calls` in flight; None if the answers are too similar in length."""
        if (fit := self._fit()) is None:
            return None
        wait_s, token_s = fit
        self._base.add(wait_s, token_s, now)
        # The wait for the step to end, of at most one time per token, is none in the queue.
        queued_s = max(0.0, wait_s - self._base.seconds(token_s) - token_s)
        return calls * queued_s / (wait_s + token_s * self._mean_tokens) if queued_s else 0.0

    def accept(self) -> None:
        """The present wait is none in a queue."""
        if (fit := self._fit()) is not None:
            self._base.accept(fit[1])

    def _fit(self) -> tuple[float, float] | None:
        """Seconds of wait and for each token, by weighted least squares.

        No wait is longer than the shortest answer: after a change of the engine's speed the fit would show one.
        """
        spread = self._inverse * self._tokens - self.count**2
        if spread <= LEAST_SPREAD * self.count**2:
            return None
        wait_s = (self._per_token * self._tokens - self.count * self._duration) / spread
        token_s = (self._inverse * self._duration - self.count * self._per_token) / spread
        return max(0.0, min(wait_s, *self._recent)), max(0.0, token_s)
