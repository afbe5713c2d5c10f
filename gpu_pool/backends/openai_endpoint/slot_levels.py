"""The number of slots by trial: measure whole answers at one number, then choose the next. Pure.

Used where an engine reports nothing and sends no streams. A level is a number of slots with the answers that started
after it was chosen. Where the answers show how many calls wait, that decides; otherwise the throughput does: N calls in
flight with a time W of a call for each token make N / W tokens/s (Little's law).
"""

import math
from typing import NamedTuple

AIM = 1.0
"""Calls of this worker that wait in the engine."""
SLACK, SLACK_SHARE = 1.5, 0.03
"""More waiting calls than AIM plus the larger of both (a number, a part of those in flight) are reduced at once."""
GROWTH, SMALL_GROWTH = 1.5, 0.05
"""Factor of one level to the next at first; part that is added once the number is known."""
DOUBLED = 16
"""Up to this number the next level has twice as many slots."""
LARGEST_GROWTH = 0.2
"""The small growth doubles up to this part while no calls wait."""
MIN_GAIN = 0.25
"""The large growth ends when the throughput grows by less for each doubling."""
RISING, MOST_RISES = 1.05, 8
"""While the number of waiting calls grows by this factor in a tick, at most for so many, a reduction would be too small."""
VAIN = 2
"""After this many reductions in a row that did not shorten the wait it is taken for a part of every call."""
TRIAL = 0.1
"""Part by which the slots are changed to compare throughput."""
SAME, BETTER = 0.98, 1.03
"""Throughput relative to before: fewer slots with at least SAME are kept, and more slots with at least BETTER."""
FIRST_REST_S, LONGEST_REST_S = 2.0, 16.0
"""Time between two trials."""


class NextLevel(NamedTuple):
    """The next number of slots; `growing`: large growth goes on; `accepts_wait`: the present wait is no queue."""

    slots: int
    source: str = ""
    growing: bool = False
    accepts_wait: bool = False


class _Measured(NamedTuple):
    slots: int
    throughput: float


class _Reduction(NamedTuple):
    """By `fewer` from `count`, when `waiting` calls waited."""

    slots: int
    fewer: float
    waiting: float
    throughput: float

    def in_vain(self, waiting: float, throughput: float) -> bool:
        """Whether it cost throughput and made none wait less."""
        share = self.fewer / self.slots
        return waiting > self.waiting * (1 - share) / 2 and throughput < (1 - share / 2) * self.throughput


class SlotLevels:
    """Call `add` at every tick, `next` when enough answers of a level are known, and `restart` after a change."""

    def __init__(self) -> None:
        self._before: _Measured | None = None
        self._trial: _Measured | None = None
        """What a trial of fewer or more slots is compared with."""
        self._up = False
        self._rest_s = FIRST_REST_S
        self._rest_until = 0.0
        self._quiet = 0
        self._waiting = 0.0
        self._rises = 0
        self._reductions: list[_Reduction] = []
        """The last reductions in a row: all in vain, except that nothing is known yet of the last one."""
        self.restart()

    def restart(self) -> None:
        """A new level begins."""
        self._sum = self._ticks = 0
        self._full = False

    def add(self, calls: int, *, full: bool) -> None:
        """One tick with that many calls in flight; whether all slots were used."""
        self._sum += calls
        self._ticks += 1
        self._full = self._full or full

    @property
    def calls(self) -> float:
        """Mean calls in flight at this level."""
        return self._sum / self._ticks if self._ticks else 0.0

    def next(self, count: int, token_s: float, waiting: float | None, now: float, *, growing: bool) -> NextLevel:
        """The next level. `token_s`: time of a call for each token; `waiting`: calls that wait, None if unknown."""
        throughput = self.calls / token_s if token_s > 0 else 0.0
        if waiting is not None and (change := self._by_queue(count, waiting, throughput)) is not None:
            return change
        if not self._full:
            return NextLevel(count, growing=growing)
        if growing:
            return self._grown(count, throughput, waiting)
        measured = _Measured(count, throughput)
        if waiting is None:
            return self._tried(measured, now)
        self._trial = None
        if waiting > AIM / 2:
            self._quiet = 0
            return NextLevel(count)
        share = min(LARGEST_GROWTH, SMALL_GROWTH * 2 ** (self._quiet // 2))
        self._quiet += 1
        return NextLevel(count + max(1, round(share * count)), f"durations: {waiting:.0f} of {self.calls:.0f} wait")

    def _by_queue(self, count: int, waiting: float, throughput: float) -> NextLevel | None:
        """A reduction if too many wait; the reversal of reductions that cost throughput and made none wait less."""
        if waiting <= AIM + max(SLACK, SLACK_SHARE * self.calls):
            self._reductions, self._rises, self._waiting = [], 0, waiting
            return None
        rising, self._waiting = waiting > RISING * self._waiting, waiting
        self._rises += rising
        if rising and self._rises <= MOST_RISES:
            return NextLevel(count)
        if self._reductions and not self._reductions[-1].in_vain(waiting, throughput):
            self._reductions = []
        if len(self._reductions) >= VAIN:
            count, self._reductions = self._reductions[0].slots, []
            return NextLevel(count, "durations: fewer slots did not shorten the wait", accepts_wait=True)
        fewer = min(waiting - AIM, self.calls / 2)
        if fewer >= TRIAL * count:
            self._reductions.append(_Reduction(count, fewer, waiting, throughput))
        self._rises = self._quiet = 0
        self._before = None
        return NextLevel(max(1, round(self.calls - fewer)), f"durations: {waiting:.0f} of {self.calls:.0f} wait")

    def _grown(self, count: int, throughput: float, waiting: float | None) -> NextLevel:
        before, self._before = self._before, _Measured(count, throughput)
        if before is not None and before.slots < count:
            needed = 1 + MIN_GAIN * math.log2(count / before.slots)
            if throughput < needed * before.throughput:
                self._before = None
                kept = count if waiting is not None else before.slots
                return NextLevel(kept, _compared(before, throughput=throughput, count=count))
        source = "growing" if before is None else _compared(before, throughput=throughput, count=count)
        factor = 2.0 if count < DOUBLED else GROWTH
        return NextLevel(math.ceil(factor * count), source, growing=True)

    def _tried(self, now: _Measured, time_s: float) -> NextLevel:
        """Compare with the last level, and try one slot or TRIAL more or less."""
        base, self._trial = self._trial, None
        if base is None or base.slots == now.slots:
            if time_s < self._rest_until:
                return NextLevel(now.slots)
            return self._try(now)
        gained = now.throughput / base.throughput if base.throughput > 0 else 1.0
        change = abs(now.slots / base.slots - 1) / TRIAL
        kept = gained >= (1 + (BETTER - 1) * change if self._up else 1 - (1 - SAME) * change)
        source = _compared(base, throughput=now.throughput, count=now.slots)
        if kept:
            self._rest_s = FIRST_REST_S
            return self._try(now, source)
        self._up = not self._up
        self._rest_until = time_s + self._rest_s
        self._rest_s = min(LONGEST_REST_S, 1.5 * self._rest_s)
        return NextLevel(base.slots, source)

    def _try(self, now: _Measured, source: str = "") -> NextLevel:
        self._trial = now
        by = max(1, round(TRIAL * now.slots))
        count = now.slots + by if self._up else max(1, now.slots - by)
        if count == now.slots:
            self._trial, self._up = None, True
        return NextLevel(count, source or "throughput: trial")


def _compared(before: _Measured, *, throughput: float, count: int) -> str:
    return f"throughput: {before.throughput:.0f} tokens/s at {before.slots}, {throughput:.0f} at {count}"
