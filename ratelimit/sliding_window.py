"""The `limits` library on our clock: a sliding window in two counters, of which a changed limit hands out nothing. No I/O.

Three things of the library's own memory storage do not fit here, and are overridden:

* it reads the wall clock, which an admin may set; here the time is handed in, and each limit's windows begin when it is
  first asked, so that the windows of all limits do not turn at once,
* it starts a thread whenever the last one has ended, some sixty a second under load; here old counters go when their
  limit is asked next, and whole limits when there are too many,
* amount and length are part of what it counts under, so that a changed limit begins with nothing spent; here a limit
  counts under its name alone, and `meet` keeps what is left of it.
"""

import math
from typing import NamedTuple

from limits import RateLimitItemPerSecond
from limits.storage import MemoryStorage


class LocalLimit(RateLimitItemPerSecond):
    """`amount` units in a window of `length_us`, of which no more than `steady` become free again in so long."""

    __slots__ = ("steady",)

    def __init__(self, amount: int, length_us: int, steady: int | None = None) -> None:
        super().__init__(amount, length_us)
        self.steady = amount if steady is None else steady

    def key_for(self, *identifiers: bytes | str | float) -> str:
        """The name and nothing else, so that a limit that changes goes on where it was."""
        return str(identifiers[0])

    def get_expiry(self) -> int:
        """Microseconds, as `SlidingWindows` counts them."""
        return self.multiples


class WindowLevel(NamedTuple):
    """How far a window is used: units of the one before, which count less and less, and of this one."""

    previous: int
    current: int
    left_us: int  # Of this window.
    length_us: int

    @property
    def used(self) -> float:
        """Units that count now."""
        return self.previous * self.left_us / self.length_us + self.current

    def until_us(self, units: float) -> float:
        """Microseconds until no more than so many units are used, if no others are added."""
        if self.used <= units:
            return 0.0
        if self.current <= units:
            return self.left_us - (units - self.current) * self.length_us / self.previous
        return self.left_us + (1 - max(0.0, units) / self.current) * self.length_us


class _WindowState:
    """What is known of one limit: what it was last, when its windows began, and the names of its two counters."""

    __slots__ = ("began_us", "current", "ends_us", "limit", "previous")

    def __init__(self, began_us: int) -> None:
        self.began_us = began_us
        self.ends_us = 0  # Of this window, by the time that the library is told.
        self.previous = self.current = ""
        self.limit: LocalLimit | None = None


class SlidingWindows(MemoryStorage):
    """Two counters a limit, for so many limits at most; `now_us` is set by the caller, and never goes back."""

    def __init__(self, max_limits: int) -> None:
        super().__init__()
        self.timer.cancel()  # The one thread that the library starts without being asked; none follows.
        self.timer.join()
        self.now_us = 0
        self._max_limits = max_limits
        self._kept: dict[str, _WindowState] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def meet(self, name: str, limit: LocalLimit, first: int) -> None:
        """Hold this limit from now on. A new one has `first` units left; one that changed has what was left, as a bucket.

        What is used then becomes free at the rate of the new limit, and no faster.
        """
        kept = self._kept.get(name)
        if kept is not None and kept.limit is not None:
            if kept.limit is limit or kept.limit == limit:
                return
            first = max(0, math.floor(kept.limit.amount - self.level(name, kept.limit).used))
            self._drop(self._kept.pop(name))
        used = max(0, limit.amount - first)
        before = min(limit.steady, used)
        kept, _ = self._present(name, limit.get_expiry())
        self.storage[kept.previous], self.storage[kept.current] = before, used - before
        kept.limit = limit

    def level(self, name: str, limit: LocalLimit) -> WindowLevel:
        """How far it is used now."""
        length_us = limit.get_expiry()
        kept, at = self._present(name, length_us)
        spent = self.storage.get
        return WindowLevel(spent(kept.previous, 0), spent(kept.current, 0), kept.ends_us - at, length_us)

    def get(self, key: str) -> int:
        """A counter; none goes by the wall clock."""
        return self.storage.get(key, 0)

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Units of the window before and microseconds that they still count; units of this one and the same of them."""
        kept, at = self._present(key, expiry)
        return self._get_sliding_window_info(kept.previous, kept.current, expiry, at)

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Spend, if there is so much left."""
        previous, previous_us, current, _ = self.get_sliding_window(key, expiry)
        if math.floor(previous * previous_us / expiry + current) + amount > limit:
            return False
        self.storage[self._kept[key].current] += amount
        return True

    def reset(self) -> int | None:
        """Forget everything."""
        self._kept.clear()
        return super().reset()

    def _present(self, name: str, length_us: int) -> tuple[_WindowState, int]:
        """A limit in its present window, and the time that the library is told."""
        kept = self._kept.get(name) or self._begin(name)
        # The library takes the window before number 0 for number 0, so we begin with 1.
        at = self.now_us - kept.began_us + length_us
        if at >= kept.ends_us:
            self._turn(name, kept, at, length_us)
        return kept, at

    def _turn(self, name: str, kept: _WindowState, at: int, length_us: int) -> None:
        """Another window: its limit goes to the end of those that are dropped first."""
        previous, current = self.sliding_window_keys(name, length_us, at)
        self._drop(kept, but=previous)
        kept.previous, kept.current, kept.ends_us = previous, current, at - at % length_us + length_us
        self._kept[name] = self._kept.pop(name)

    def _begin(self, name: str) -> _WindowState:
        if len(self._kept) >= self._max_limits:
            self._drop(self._kept.pop(next(iter(self._kept))))
        kept = self._kept[name] = _WindowState(self.now_us)
        return kept

    def _drop(self, kept: _WindowState, but: str = "") -> None:
        for counter in (kept.previous, kept.current):
            if counter != but:
                self.storage.pop(counter, None)
