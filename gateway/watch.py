"""Deadlines of connections without timers: things that wait are kept in the order in which they time out.

Every entry of one watch has the same timeout, so a dict in insertion order is sorted by deadline, and one sweep looks
only at what is due. A connection whose bytes arrive at once never enters a watch.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Watch(Generic[T]):
    """What waits for one kind of progress, each for at most `timeout_s`. Times are monotonic seconds."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadlines: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, item: T) -> bool:
        return item in self._deadlines

    def start(self, item: T, now: float) -> None:
        """Begin to wait; an item that is waiting already keeps its deadline."""
        if item not in self._deadlines:
            self._deadlines[item] = now + self.timeout_s

    def stop(self, item: T) -> None:
        """The progress came, or the item is gone."""
        self._deadlines.pop(item, None)

    def expired(self, now: float) -> list[T]:
        """Take out and return what is due."""
        due: list[T] = []
        for item, deadline in self._deadlines.items():
            if deadline > now:
                break
            due.append(item)
        for item in due:
            del self._deadlines[item]
        return due
