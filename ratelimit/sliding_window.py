"""Sliding windows of two counters; a changed limit keeps its usage. No I/O, no clock.

The windows of a limit begin with its first use, so that the windows of all limits do not end at once. The oldest limits
are dropped when there are too many.
"""

import math
from typing import NamedTuple


class LocalLimit(NamedTuple):
    """`amount` units in a window of `length_us`, of which at most `steady` are released per window (0: all)."""

    amount: int
    length_us: int
    steady: int = 0


class WindowLevel(NamedTuple):
    """The usage: units of the previous window, whose weight decreases, and of the current one."""

    previous: int
    current: int
    left_us: int  # Left in the current window.
    length_us: int

    @property
    def used(self) -> float:
        """The used units."""
        return self.previous * self.left_us / self.length_us + self.current

    def until_us(self, units: float) -> float:
        """Microseconds until at most `units` are used, if none are added."""
        if self.used <= units:
            return 0.0
        if self.current <= units:
            return self.left_us - (units - self.current) * self.length_us / self.previous
        return self.left_us + (1 - max(0.0, units) / self.current) * self.length_us


class _WindowState:
    """One limit: its last value, the start of its current window, and the units of the previous and of this one."""

    __slots__ = ("began_us", "current", "limit", "previous")

    def __init__(self, began_us: int) -> None:
        self.began_us = began_us
        self.previous = self.current = 0
        self.limit: LocalLimit | None = None


class SlidingWindows:
    """Two counters per limit, for at most `max_limits` limits; the caller sets `now_us`, which never goes back."""

    def __init__(self, max_limits: int) -> None:
        self.now_us = 0
        self._max_limits = max_limits
        self._kept: dict[str, _WindowState] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def meet(self, name: str, limit: LocalLimit, first: int) -> None:
        """Set the limit. A new one has `first` units left; a changed one keeps its usage.

        Used units are released at the rate of the new limit.
        """
        kept = self._kept.get(name)
        if kept is not None and kept.limit is not None:
            if kept.limit == limit:
                return
            first = max(0, math.floor(kept.limit.amount - self.level(name, kept.limit).used))
            del self._kept[name]
        used, steady, length_us = max(0, limit.amount - first), limit.steady or limit.amount, limit.length_us
        before, during, began_us = used, 0, self.now_us
        if used > steady:
            # Two windows release it. The current one is full, so that it does not release more than `steady` later, and
            # the part of the previous one that still counts is the rest.
            before = during = steady
            began_us += math.ceil((used - steady) * length_us / steady) - length_us
        kept = self._kept.get(name) or self._begin(name, began_us)
        kept.previous, kept.current, kept.limit = before, during, limit

    def level(self, name: str, limit: LocalLimit) -> WindowLevel:
        """The current usage."""
        kept, length_us = self._kept.get(name) or self._begin(name, self.now_us), limit.length_us
        elapsed_us = self.now_us - kept.began_us
        if elapsed_us >= length_us:  # The next window starts, and the limit moves to the end of the eviction order.
            kept.previous, kept.current = kept.current if elapsed_us < 2 * length_us else 0, 0
            elapsed_us %= length_us
            kept.began_us = self.now_us - elapsed_us
            self._kept[name] = self._kept.pop(name)
        return WindowLevel(kept.previous, kept.current, length_us - elapsed_us, length_us)

    def spend(self, name: str, limit: LocalLimit, units: int = 1) -> bool:
        """Use `units` if they are left."""
        if math.floor(self.level(name, limit).used) + units > limit.amount:
            return False
        self._kept[name].current += units
        return True

    def clear(self) -> None:
        """Remove all limits."""
        self._kept.clear()

    def _begin(self, name: str, began_us: int) -> _WindowState:
        if len(self._kept) >= self._max_limits:
            del self._kept[next(iter(self._kept))]
        kept = self._kept[name] = _WindowState(began_us)
        return kept
