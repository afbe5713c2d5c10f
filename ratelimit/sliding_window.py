"""Sliding windows of two counters, with the `limits` library; a changed limit keeps its usage. No I/O.

Three properties of the library's memory storage are overridden:

* It reads the wall clock, which an admin may set. Here the time is a parameter, and the windows of a limit begin with its
  first use, so that the windows of all limits do not end at once.
* It starts a thread whenever the last one has ended, about sixty per second under load. Here old counters are removed when
  their limit is used next, and the oldest limits when there are too many.
* Amount and length are part of its key, so that a changed limit starts unused. Here the key is the name only, and `meet`
  keeps the usage.
"""

import math
from typing import NamedTuple

from limits import RateLimitItemPerSecond
from limits.storage import MemoryStorage


class LocalLimit(RateLimitItemPerSecond):
    """`amount` units in a window of `length_us`, of which at most `steady` are released per window."""

    __slots__ = ("steady",)

    def __init__(self, amount: int, length_us: int, steady: int | None = None) -> None:
        super().__init__(amount, length_us)
        self.steady = amount if steady is None else steady

    def key_for(self, *identifiers: bytes | str | float) -> str:
        """The name only, so that a changed limit keeps its counters."""
        return str(identifiers[0])

    def get_expiry(self) -> int:
        """The length in microseconds."""
        return self.multiples


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
    """The state of one limit: its last value, the start of its windows, and the keys of its two counters."""

    __slots__ = ("began_us", "current", "ends_us", "limit", "previous")

    def __init__(self, began_us: int) -> None:
        self.began_us = began_us
        self.ends_us = 0  # End of the current window, in the library's time.
        self.previous = self.current = ""
        self.limit: LocalLimit | None = None


class SlidingWindows(MemoryStorage):
    """Two counters per limit, for at most `max_limits` limits; the caller sets `now_us`, which never goes back."""

    def __init__(self, max_limits: int) -> None:
        super().__init__()
        self.timer.cancel()  # The library's thread; no other one is started.
        self.timer.join()
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
            if kept.limit is limit or kept.limit == limit:
                return
            first = max(0, math.floor(kept.limit.amount - self.level(name, kept.limit).used))
            self._drop(self._kept.pop(name))
        used, steady, length_us = max(0, limit.amount - first), limit.steady, limit.get_expiry()
        before, during = used, 0
        if used > steady:
            # Two windows release it. The current one is full, so that it does not release more than `steady` later, and
            # the part of the previous one that still counts is the rest.
            before = during = steady
            self._begin(name, self.now_us - length_us + math.ceil((used - steady) * length_us / steady))
        kept, _ = self._current(name, length_us)
        self.storage[kept.previous], self.storage[kept.current] = before, during
        kept.limit = limit

    def level(self, name: str, limit: LocalLimit) -> WindowLevel:
        """The current usage."""
        length_us = limit.get_expiry()
        kept, at = self._current(name, length_us)
        spent = self.storage.get
        return WindowLevel(spent(kept.previous, 0), spent(kept.current, 0), kept.ends_us - at, length_us)

    def get(self, key: str) -> int:
        """A counter, without expiry by the wall clock."""
        return self.storage.get(key, 0)

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Units of the previous window and the microseconds for which they count; the same of the current one."""
        kept, at = self._current(key, expiry)
        left_us = kept.ends_us - at  # Exact, as in `level`.
        return self.get(kept.previous), left_us, self.get(kept.current), left_us + expiry

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Use `amount` units if they are left."""
        previous, previous_us, current, _ = self.get_sliding_window(key, expiry)
        if math.floor(previous * previous_us / expiry + current) + amount > limit:
            return False
        self.storage[self._kept[key].current] += amount
        return True

    def reset(self) -> int | None:
        """Remove all limits."""
        self._kept.clear()
        return super().reset()

    def _current(self, name: str, length_us: int) -> tuple[_WindowState, int]:
        """The state of a limit in its current window, and the library's time."""
        kept = self._kept.get(name) or self._begin(name, self.now_us)
        # The library treats the window before number 0 as number 0, so the first one is 1.
        at = self.now_us - kept.began_us + length_us
        if at >= kept.ends_us:  # The next window starts, and the limit moves to the end of the eviction order.
            previous, current = self.sliding_window_keys(name, length_us, at)
            self._drop(kept, but=previous)
            kept.previous, kept.current, kept.ends_us = previous, current, at - at % length_us + length_us
            self._kept[name] = self._kept.pop(name)
        return kept, at

    def _begin(self, name: str, began_us: int) -> _WindowState:
        if len(self._kept) >= self._max_limits:
            self._drop(self._kept.pop(next(iter(self._kept))))
        kept = self._kept[name] = _WindowState(began_us)
        return kept

    def _drop(self, kept: _WindowState, but: str = "") -> None:
        for counter in (kept.previous, kept.current):
            if counter != but:
                self.storage.pop(counter, None)
