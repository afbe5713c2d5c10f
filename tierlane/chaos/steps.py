"""Steps of the clock of Redis, as an event tells them and as the checker reads them: what they move, and when."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

FORWARD, BACKWARD = "clock-forward", "clock-backward"
CLOCK_STEPS = frozenset({FORWARD, BACKWARD})


def told_step(seconds: float) -> str:
    """As the details of the event have it."""
    return f"{seconds:+.3f} s"


def read_step(details: str) -> float:
    """The seconds of `told_step`."""
    return float(details.split(maxsplit=1)[0])


@dataclass(frozen=True)
class Step:
    """At `at` (monotonic seconds) the clock was moved by `by_s`."""

    at: float
    by_s: float


class SteppedClock:
    """The clock of Redis over one run. An event is stamped shortly after its step, so a step is a span of `stamp_s`."""

    def __init__(self, steps: Iterable[Step], stamp_s: float) -> None:
        self._steps = sorted(steps, key=lambda step: step.at)
        self._stamp_s = stamp_s
        self._ahead = [0.0]
        for step in self._steps:
            self._ahead.append(self._ahead[-1] + step.by_s)
        self._times = [step.at for step in self._steps]

    def __bool__(self) -> bool:
        """Whether it ever stepped."""
        return bool(self._steps)

    def forward(self, begin: float, end: float) -> float:
        """Seconds by which it went forwards in between, over all steps in that direction."""
        return sum(step.by_s for step in self._between(begin, end) if step.by_s > 0)

    def backward(self, begin: float, end: float) -> float:
        """Seconds by which it went backwards in between, over all steps in that direction."""
        return -sum(step.by_s for step in self._between(begin, end) if step.by_s < 0)

    def true_times(self, shown: float) -> list[float]:
        """When it may have been that the clock showed this time: none, one, or several after a step backwards."""
        return [shown - ahead for steps, ahead in enumerate(self._ahead) if self._may_have(steps, shown - ahead)]

    def _between(self, begin: float, end: float) -> Iterable[Step]:
        return (step for step in self._steps if begin - self._stamp_s <= step.at <= end + self._stamp_s)

    def _may_have(self, steps: int, at: float) -> bool:
        """Whether so many steps may have been made by then."""
        least, most = (bisect_right(self._times, at + way * self._stamp_s) for way in (-1, 1))
        return least <= steps <= most
