"""How long to wait before the next attempt: with jitter, so that a fleet does not come back all at once."""

import random
from collections.abc import Callable


class Backoff:
    """Grows from `first_s` to `most_s` (seconds), doubling; each wait is drawn from the upper half of its step."""

    def __init__(self, first_s: float, most_s: float, draw: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw
        self._step_s = first_s

    def next_s(self) -> float:
        """The wait before the next attempt, in seconds."""
        step, self._step_s = self._step_s, min(self._step_s * 2, self._most_s)
        return step * (0.5 + 0.5 * self._draw())

    def reset(self) -> None:
        """An attempt was good: the next wait is a short one again."""
        self._step_s = self._first_s
