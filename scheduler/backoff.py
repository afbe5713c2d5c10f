"""Backoff: full jitter between tries, so that nobody spins while a server is away and nobody returns in step."""

import asyncio
import random
from collections.abc import Callable


class Backoff:
    """Delays drawn from 0..ceiling, the ceiling doubling from `first_s` to `most_s` until reset."""

    def __init__(
        self, first_s: float = 0.05, most_s: float = 1.0, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """The next delay in seconds; never under a tenth of the first, so that a loop always yields for real."""
        delay = max(self._first_s / 10, self._draw(0.0, self._ceiling_s))
        self._ceiling_s = min(self._most_s, self._ceiling_s * 2)
        return delay

    def reset(self) -> None:
        self._ceiling_s = self._first_s

    async def sleep(self) -> None:
        await asyncio.sleep(self.next_s())
