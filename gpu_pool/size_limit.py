"""How many items the device holds in one go, as learnt from running out of memory. Pure."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class SizeLimit:
    """`largest`: the most items for one go; 0 while nothing failed. It never rises: what filled the memory may stay."""

    def __init__(self) -> None:
        self.largest = 0

    def too_large(self, size: int) -> None:
        """`size` items did not fit: from now on at most half of that, and at least 1."""
        half = max(1, size // 2)
        self.largest = min(half, self.largest or half)

    def parts(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """The items in goes that fit; a limit that falls meanwhile holds for what is left. One go for no items."""
        start = 0
        while start == 0 or start < len(items):
            end = start + (self.largest or len(items) or 1)
            yield items[start:end]
            start = end
