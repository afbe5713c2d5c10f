"""Memory of what was seen over time: for how long a condition has held, and the extremes of a figure lately. Pure."""

from collections import deque


class HeldFor:
    """Since when a condition holds without a break. Times are seconds of one clock."""

    __slots__ = ("_since_s",)

    def __init__(self) -> None:
        self._since_s: float | None = None

    def look(self, holds: bool, now_s: float) -> None:  # noqa: FBT001 - what is looked at is a truth
        """It holds now, or it does not."""
        if not holds:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def lasted_s(self, now_s: float) -> float:
        """For how long; -1 where it does not hold."""
        return -1.0 if self._since_s is None else now_s - self._since_s


class Extremes:
    """The lowest and the highest of a figure over the last `span_s` seconds."""

    __slots__ = ("_began_s", "_seen", "_span_s")

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._seen: deque[tuple[float, int]] = deque()
        self._began_s: float | None = None

    def look(self, figure: int, now_s: float) -> None:
        """Take a figure; forget those that are older than the span."""
        if self._began_s is None:
            self._began_s = now_s
        self._seen.append((now_s, figure))
        while now_s - self._seen[0][0] > self._span_s:
            self._seen.popleft()

    def whole(self, now_s: float) -> bool:
        """Whether it was looked at for the whole span already."""
        return self._began_s is not None and now_s - self._began_s >= self._span_s

    @property
    def lowest(self) -> int:
        """0 before the first look."""
        return min((figure for _, figure in self._seen), default=0)

    @property
    def highest(self) -> int:
        """0 before the first look."""
        return max((figure for _, figure in self._seen), default=0)
