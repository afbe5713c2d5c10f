"""Random delays between attempts, with a ceiling that doubles."""

import asyncio
import random
from collections.abc import Callable


class Backoff:
    """Random delays between 0 and a ceiling, which doubles from `first_s` to `most_s` until reset."""

    def __init__(
        self, first_s: float = 0.05, most_s: float = 1.0, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """The next delay in seconds; at least a tenth of the first, so that a loop always yields."""
        delay = max(self._first_s / 10, self._draw(0.0, self._ceiling_s))
        self._ceiling_s = min(self._most_s, self._ceiling_s * 2)
        return delay

    def reset(self) -> None:
        self._ceiling_s = self._first_s

    async def sleep(self) -> None:
        await asyncio.sleep(self.next_s())
