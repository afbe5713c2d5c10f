"""How many requests a worker runs at a time in an engine with continuous batching. Pure: clocks are arguments.

The aim is one waiting request of this worker in the engine: then the engine has all the work that it can take, and
everything else waits in the tier queues, where it can still be overtaken. Workers before one engine share it evenly
by that rule, since a worker with more requests has more of the waiting ones.

The number of waiting requests comes from the engine's metrics, else from the first outputs of streams, else from the
durations of answers (call_times.py). Answers of equal length show no queue; then the throughput decides. At first the
slots are doubled. They are reduced at once when the engine refuses requests, or is slower than the objective.
"""

import math
from collections import deque
from typing import NamedTuple

from gpu_pool.backends.openai_endpoint.call_times import AnswerTimes, Call, StreamTimes
from gpu_pool.backends.openai_endpoint.engine_load import EngineLoad
from gpu_pool.backends.openai_endpoint.slot_levels import SlotLevels

START = 8
KEPT_FREE = 2
"""Slots that the scheduler may keep free for the highest tier (scheduler/batching/slot_policy.py): the others are all in use."""
MOST = 4096
AIM, AIM_SHARE = 0.5, 0.2
"""The wanted number of this worker's waiting requests is AIM and ENDED_PART of the requests that end in a step, at most 1
plus AIM_SHARE of those in flight: the waiting ones fill the places of those that end, and those that came since the last
step count as waiting too. The constant part makes the shares of several workers equal.
"""
ENDED_PART = 0.75
GAIN, LOSS = 0.25, 0.125
"""Slots added in a tick with less than half the wanted number; slots removed for each request above it."""
SLACK, ESTIMATED_SLACK, SLACK_SHARE = 1.0, 2.0, 0.04
"""More waiting requests than wanted plus a number (by metrics, by first outputs), or a part of those in flight if that
is more, are reduced at once.
"""
STEP_SHARE, FAST_SHARE = 0.1, 0.25
"""The largest growth in one tick after the first doubling, and after FULL_STEPS of these."""
LEAST_ANSWERS, MOST_ANSWERS = 6.0, 16.0
"""Answers that make a measurement: a quarter of the calls in flight, within these limits."""
SMALL_SHARE, LARGE_SHARE = 0.08, 0.2
"""After a smaller change the answers before it count on, and the next change comes an answer later, unless a LARGE_SHARE
of the calls waits.
"""
LENGTH_GAIN = 0.02
"""Weight of an answer in the mean length."""
RECENT = 4
"""Requests wait for long only if all of this many last readings have some."""
QUIET_TICKS = 4
"""After this many ticks without requests that wait for long the growth accelerates."""
FULL_STEPS = 3
NEAR = 0.95
"""Above this part of the objective for the time between tokens the slots are not raised."""
MEASURED_S = 5.0
"""After a reduction for that reason they are not raised for as long, unless it was measured again."""
FULL_CACHE = 0.95
"""With a larger part of the KV cache used, the slots are not doubled."""
KEPT_S = 2.0
"""Without readings of the engine's metrics the slots stay as they are for so long."""
STALE_TICKS, REPEATED_TICKS = 8, 3
"""Some engines update their metrics seldom: identical readings are ignored for this many ticks after a reduction, and
for so many otherwise."""
VAIN_SHARE, VAIN_STEP, VAIN_S = 0.15, 2, 1.5
"""Reductions by this part are judged so many seconds after the slots were first reduced by this number."""
REST_S = 0.6
"""And at least so many after the last reduction of what waits too much."""
VAIN_WAITING = 0.7
"""Of the waiting requests, and reduced in proportion, at least this part still waits after a reduction in vain."""
FIRST_HOLD_S, LONGEST_HOLD_S = 1.0, 2.0
"""Time after a refusal until one more request is tried. A refusal is cheap: the request goes back to the head of its queue."""
SURVIVED_S, TRIAL_GROWTH = 0.5, 4
"""After this time without a refusal as many more times the last number are tried."""


class SlotPolicy:
    """Call `tick` about every 250 ms while requests run; then read `count`, `source` and `excess`.

    `tpot_ms`: the objective for the time between tokens, None without one.
    """

    def __init__(self, *, tpot_ms: float | None = None) -> None:
        self.count = START
        """Requests that may run at a time."""
        self.source = "start"
        """The evidence for `count`, a phrase for operators."""
        self.excess = 0
        """Of the calls without output, the youngest that should be withdrawn now."""
        self._tpot_s = tpot_ms / 1000 if tpot_ms else math.inf
        self._mean_tokens = 0.0
        self._calls: dict[Call, None] = {}
        self._streams = StreamTimes()
        self._answers = AnswerTimes()
        self._ceiling = _Ceiling()
        self._most = MOST
        self._exact = float(START)
        self._peak = 0
        self._resumed = False
        self._doubling = True
        self._queue = _QueueSteps()
        self._levels = SlotLevels()
        self._slow_until = self._small_until = 0.0
        self._load_until = 0.0

    def set_objective(self, tpot_ms: float) -> None:
        """Change the objective; 0: none."""
        self._tpot_s = tpot_ms / 1000 if tpot_ms else math.inf

    def resume(self, count: int) -> None:
        """Begin with the slots that an earlier process had."""
        self.count = max(1, min(MOST, count))
        self._exact = float(self.count)
        self.source = "resumed"
        self._resumed = True

    @property
    def in_flight(self) -> int:
        """Calls that have started and not ended."""
        return len(self._calls)

    def start(self, now: float, *, streamed: bool) -> Call:
        """A request is sent to the engine."""
        call = Call(now, streamed)
        self._calls[call] = None
        self._peak = max(self._peak, len(self._calls))
        return call

    def output(self, call: Call, now: float) -> None:
        """A stream sent a part of its output."""
        self._streams.output(call, now)

    def end(self, call: Call, now: float, tokens: int) -> None:
        """A request was answered. `tokens`: of the output, 0 if there are none or the server does not report them.

        If no answer has any, their throughput is in answers/s.
        """
        self._calls.pop(call, None)
        if tokens:
            self._mean_tokens += (tokens - self._mean_tokens) * (LENGTH_GAIN if self._mean_tokens else 1)
        if call.streamed:
            self._streams.ended(call, tokens)
        else:
            self._answers.ended(call, tokens or (0 if self._mean_tokens else 1), now)

    def leave(self, call: Call) -> None:
        """A request was withdrawn or cancelled, or failed."""
        self._calls.pop(call, None)

    def refuse(self, call: Call, now: float) -> None:
        """The engine refused a request for lack of capacity (429, 503)."""
        self._calls.pop(call, None)
        accepted = len(self._calls)
        if not accepted:
            self._ceiling.lower(1, self.count, now)
            self._set(1, "all refused")
            self._doubling = False
            return
        if accepted < self.count or accepted < self._ceiling.count:
            self._ceiling.lower(min(accepted, self.count), self.count, now)
            self._set(self._ceiling.count, f"refused above {accepted}")
            self._doubling = False
            self._answers.restart(now)

    def tick(self, now: float, load: EngineLoad | None) -> None:
        """Adapt `count`. `load`: what the engine reported just now; None if it reports nothing."""
        calls = len(self._calls)
        full = self._peak >= self.count - min(KEPT_FREE, self.count // 16)
        self._peak, self.excess = calls, 0
        self._streams.measure(now)
        if load is not None and load.most is not None and load.most != self._most:
            self._most = load.most
            self._set(load.most, f"{load.source}: {load.most} slots")
        if self._ceiling.passed(self.count, now, full=full):
            self._queue.quiet = 0
            self._set(max(self._exact, self._ceiling.trial), "no refusals")
        if self._too_slow(now):
            return
        # Of no use without the waiting requests, or with figures that cannot be of the engine that has these calls.
        if load is not None and (load.waiting is None or 8 * (load.running + load.waiting) < calls):
            load = None
        if load is not None:
            self._load_until, self._resumed = now + KEPT_S, False
        elif now < self._load_until:
            return
        waiting: float | None
        if load is not None and load.waiting is not None:
            source = f"{load.source}: {load.running} running, {load.waiting} waiting"
            waiting = load.waiting * calls / max(1, load.running + load.waiting)
        else:
            waiting = self._streams.waiting(reversed(self._calls), now)
            source = f"first outputs: {waiting or 0:.0f} of {calls} wait"
        if waiting is not None:
            self._by_queue(waiting, source, calls, now, full=full, load=load)
        else:
            self._by_answers(now, calls, full=full)

    def _set(self, exact: float, source: str = "") -> None:
        """Change the slots, within all limits. Small changes of the exact number leave the rounded one as it is."""
        self._exact = max(1.0, min(exact, self._most, self._ceiling.limit, MOST))
        if abs(self._exact - self.count) >= 0.75:
            self.count = round(self._exact)
        self.source = source or self.source

    def _too_slow(self, now: float) -> bool:
        """Whether the time between tokens is near or above its objective; reduces the slots above it."""
        token_s = self._streams.token_s
        if not token_s and self._mean_tokens and self._tpot_s < math.inf:
            if self._answers.count < LEAST_ANSWERS:
                return now < self._slow_until + MEASURED_S
            token_s = self._answers.token_s
        if token_s <= self._tpot_s:
            return token_s > NEAR * self._tpot_s
        if now >= self._slow_until:
            self._slow_until = now + max(1.0, 20 * token_s)
            source = f"{token_s * 1000:.0f} ms per token, objective {self._tpot_s * 1000:.0f}"
            self._set(math.floor(self.count * max(0.5, self._tpot_s / token_s)), source)
            self._answers.restart(now)
            self._doubling = False
        return True

    def _by_queue(
        self, waiting: float, source: str, calls: int, now: float, *, full: bool, load: EngineLoad | None
    ) -> None:
        """Reduce at once what waits too much in two readings; else double, or approach AIM."""
        queue = self._queue
        if queue.is_stale(load):
            return
        falling = queue.falling(load)
        standing, queue.before = min(waiting, queue.before), waiting
        aim = AIM
        if load is not None:
            ended = calls / self._mean_tokens if self._mean_tokens else 0.0
            aim = min(AIM + max(0.5, ENDED_PART * ended), 1 + AIM_SHARE * calls)
        if load is None and (count := queue.before_vain_reduction(waiting, aim, self.count, self._streams, now)):
            self._streams.accept()
            self._set(count, "first outputs: fewer slots did not make them earlier")
            return
        slack = max(ESTIMATED_SLACK if load is None else SLACK, SLACK_SHARE * calls)
        settled = load is not None or now >= queue.settled_at
        if standing > aim + slack and settled and (load is not None or self._streams.firsts > queue.firsts):
            queue.settled_at, queue.firsts = now + self._streams.settling_s, self._streams.firsts
            self.excess = round(standing - aim)
            self._set(calls - standing + aim - falling, source)
            self._doubling = False
            queue.reduced(now, load)
            return
        news = queue.is_news(load)
        if self._doubling:
            has_cache = load is None or (load.cache_share or 0.0) < FULL_CACHE
            if waiting <= aim + slack and full and settled and news and has_cache:
                self._set(2 * self.count, source)
                queue.settled_at = now + 2 * self._streams.settling_s
            return
        if settled:
            if queue.quiet > QUIET_TICKS:
                queue.settled_at = now + self._streams.settling_s
            self._set(self._exact + queue.step(waiting, aim, self.count, full=full, news=news), source)

    def _by_answers(self, now: float, calls: int, *, full: bool) -> None:
        """Adapt the slots once enough answers have come that started after the last change."""
        levels, answers = self._levels, self._answers
        if self._resumed:  # The time of a call that does not wait has to be seen first.
            self._resumed = False
            self._set(max(START, self.count // 2))
        levels.add(calls, full=full)
        if answers.count < max(LEAST_ANSWERS, min(MOST_ANSWERS, levels.calls / 4)):
            return
        waiting = answers.waiting(levels.calls, now)
        if now < self._small_until and (waiting or 0.0) < LARGE_SHARE * calls:
            return
        change = levels.next(self.count, answers.token_s, waiting, now, growing=self._doubling)
        if change.accepts_wait:
            answers.accept()
        self._doubling = change.growing
        if change.slots == self.count:
            return
        self._small_until = now + answers.mean_s
        if abs(change.slots - self.count) > SMALL_SHARE * self.count:
            answers.restart(now)
        self._set(change.slots, change.source)
        levels.restart()


class _Ceiling:
    """The most requests that an engine accepts, learnt from refusals. More are tried now and then, up to as many as before."""

    def __init__(self) -> None:
        self.count = MOST
        self._before = MOST
        self._until = 0.0
        self._hold_s = FIRST_HOLD_S
        self._step = 0
        self._survives_at = math.inf

    @property
    def limit(self) -> int:
        """The most slots now."""
        return self.count + self._step

    @property
    def trial(self) -> int:
        """The slots to try now; 0 for none."""
        return min(self.limit, self._before) if self._step else 0

    def lower(self, accepted: int, count: int, now: float) -> None:
        """More than `accepted` were refused, with `count` slots."""
        if self.count >= MOST or count > self._before:
            self._before = count
        if now >= self._until:  # Otherwise one of the same burst.
            self._hold_s = min(LONGEST_HOLD_S, 2 * self._hold_s) if self._step else FIRST_HOLD_S
        self.count, self._step, self._survives_at = accepted, 0, math.inf
        self._until = now + self._hold_s

    def passed(self, count: int, now: float, *, full: bool) -> bool:
        """Whether a number above the ceiling was just accepted for a while, or may be tried now."""
        if self.count >= MOST or now < self._until:
            return False
        if not self._step:
            self._step = 1
            return True
        if count <= self.count or not full:
            return False
        if now < self._survives_at:
            self._survives_at = min(self._survives_at, now + SURVIVED_S)
            return False
        self.count, self._step, self._survives_at = count, TRIAL_GROWTH * self._step, math.inf
        return True


class _WaitingSince(NamedTuple):
    """The state when requests began to wait; `at`: the first reduction; `waiting`: the most since then."""

    at: float
    slots: int
    waiting: float
    rate: float


class _QueueSteps:
    """Steps of the slots towards AIM waiting requests."""

    def __init__(self) -> None:
        self.before = 0.0
        self.quiet = 0
        self.full_steps = 0
        self.settled_at = 0.0
        self.firsts = 0
        """First outputs at the last reduction: withdrawn calls, which have none, are no evidence for a further one."""
        self._reduced_at = 0.0
        self._first: _WaitingSince | None = None
        self._load: EngineLoad | None = None
        self._stale: tuple[EngineLoad, int] | None = None
        self._repeated = 0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def before_vain_reduction(
        self, waiting: float, aim: float, count: int, streams: StreamTimes, now: float
    ) -> int | None:
        """The slots before reductions that cost throughput and made no fewer requests wait: these do not queue."""
        if waiting <= aim:
            self._first = None
            return None
        if self._first is None:
            self._first = _WaitingSince(math.inf, count, waiting, streams.rate)
        first = self._first
        at = min(first.at, now) if count <= first.slots - VAIN_STEP else math.inf
        first = self._first = first._replace(at=at, waiting=max(waiting, first.waiting))
        fewer = first.slots - count
        if (
            fewer < VAIN_SHARE * first.slots
            or now < max(first.at + VAIN_S, self._reduced_at + REST_S) + streams.settling_s
        ):
            return None
        share = fewer / first.slots
        if waiting < VAIN_WAITING * first.waiting * (1 - share) or streams.rate > (1 - share / 2) * first.rate:
            return None
        self._first = None
        return first.slots

    def is_news(self, load: EngineLoad | None) -> bool:
        """Whether a reading differs from the last one, or has been repeated for long."""
        self._repeated = self._repeated + 1 if load is not None and load == self._load else 0
        self._load = load
        return self._repeated % (REPEATED_TICKS + 1) == 0

    def is_stale(self, load: EngineLoad | None) -> bool:
        """Whether a reading is still the one of the last reduction."""
        if self._stale is None:
            return False
        before, left = self._stale
        self._stale = (before, left - 1) if left and load == before else None
        return self._stale is not None

    def reduced(self, now: float, load: EngineLoad | None) -> None:
        """The slots were reduced: a further reduction needs two new readings."""
        self._stale = None if load is None else (load, STALE_TICKS)
        self._reduced_at = now
        self.before = 0.0
        self.quiet = self.full_steps = 0

    def falling(self, load: EngineLoad | None) -> int:
        """By how much fewer requests run than at the last reading."""
        return max(0, self._load.running - load.running) if load is not None and self._load is not None else 0

    def step(self, waiting: float, aim: float, count: int, *, full: bool, news: bool) -> float:
        """The change of the slots; slots that are not all used are not raised."""
        self._recent.append(waiting)
        if self._load is None:  # First outputs: what waits has waited for longer than a step.
            self._recent.extend([waiting] * RECENT)
        if min(self._recent) > aim / 2 or not full:
            self.quiet = self.full_steps = 0
        last = min(waiting, self._recent[-2]) if len(self._recent) > 1 else waiting
        if last > aim or not full or min(self._recent) > aim / 2:
            return max(-2.0, LOSS * min(0.0, aim - waiting))
        if last > aim / 2 or not news:
            return GAIN
        self.quiet += 1
        largest = max(1.0, (STEP_SHARE if self.full_steps < FULL_STEPS else FAST_SHARE) * count)
        step = min(largest, GAIN * 2.0 ** max(0, self.quiet - QUIET_TICKS))
        self.full_steps += step >= largest
        return step
