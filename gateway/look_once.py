"""Looks that many may ask for at once: one at a time for each name, few at a time in all, kept for a moment.

For what lies behind a connection that a client must not be able to wear out by asking again and again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

MAX_KEPT = 1024

T = TypeVar("T")


class Found(NamedTuple, Generic[T]):
    """What a look gave, or the sentence that says why it gave nothing."""

    value: T | None
    problem: str | None = None


class LookOnce(Generic[T]):
    """Asks by `name`, an identity of what is looked for. Times in seconds.

    Good answers are kept for `keep_s`, failures for `sorry_s`; a look takes `timeout_s` at most, and `at_once` may be
    under way. `failed` is what is said of one that failed, whatever it was.
    """

    def __init__(
        self,
        failed: str,
        *,
        keep_s: float,
        sorry_s: float,
        timeout_s: float,
        at_once: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failed = failed
        self._keep_s = keep_s
        self._sorry_s = sorry_s
        self._timeout_s = timeout_s
        self._at_once = at_once
        self._clock = clock
        self._kept: dict[str, tuple[float, Found[T]]] = {}
        self._under_way: dict[str, asyncio.Task[Found[T]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def find(self, name: str, look: Callable[[], Awaitable[T]]) -> Found[T]:
        """What is kept of `name`, else what the look under way gives, else a new look, where one may begin."""
        kept = self._kept.get(name)
        if kept is not None and self._clock() < kept[0]:
            return kept[1]
        task = self._under_way.get(name)
        if task is None:
            if len(self._under_way) >= self._at_once:
                return Found(None, "Too many ask for this at once; ask again soon.")
            task = self._under_way[name] = asyncio.create_task(self._look(name, look), name="look once")
        await asyncio.wait([task])  # Not the task itself: who leaves would take it from the others.
        return Found(None, self._failed) if task.cancelled() else task.result()

    async def _look(self, name: str, look: Callable[[], Awaitable[T]]) -> Found[T]:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = Found(await look())
        except Exception:  # noqa: BLE001  # drivers have no one base for all that can go wrong on the way
            found = Found(None, self._failed)
        finally:
            del self._under_way[name]
        self._keep(name, found)
        return found

    def _keep(self, name: str, found: Found[T]) -> None:
        self._kept.pop(name, None)
        if len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[name] = (self._clock() + (self._keep_s if found.problem is None else self._sorry_s), found)

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
