"""The most items that fit into the memory of the device at once."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class SizeLimit:
    """`largest`: the most items to run at once; 0 without a limit. It never rises: the memory may stay occupied."""

    def __init__(self) -> None:
        self.largest = 0

    def too_large(self, size: int) -> None:
        """`size` items did not fit: allow at most half of that, and at least 1."""
        half = max(1, size // 2)
        self.largest = min(half, self.largest or half)

    def parts(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """The items in parts that fit; a limit that falls meanwhile applies to the rest. One empty part for no items."""
        start = 0
        while start == 0 or start < len(items):
            end = start + (self.largest or len(items) or 1)
            yield items[start:end]
            start = end
