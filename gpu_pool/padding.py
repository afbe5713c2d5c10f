"""How much of what a model computes is padding: positions that hold a token, against all that its passes took.

A backend that pads may have an attribute `padding` of this kind; whoever runs its batches asks it after each.
"""

from collections.abc import Sequence


class Padding:
    """Counts one batch's positions."""

    def __init__(self) -> None:
        self._real = 0
        self._computed = 0

    def passed(self, lengths: Sequence[int]) -> None:
        """A pass over rows of these lengths, each padded to the longest."""
        self._real += sum(lengths)
        self._computed += max(lengths, default=0) * len(lengths)

    def stepped(self, live: int, rows: int) -> None:
        """A step of one token a row, of which only `live` still need one."""
        self._real += live
        self._computed += rows

    def take(self) -> float:
        """The share of padding (0..1) since this was last asked; 0 where nothing was computed."""
        share = 1 - self._real / self._computed if self._computed else 0.0
        self._real = self._computed = 0
        return share
