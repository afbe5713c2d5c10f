"""Lookups in Redis or PostgreSQL that are shared, bounded in number, and kept for a moment."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from scheduler.bounded_dict import BoundedDict

MAX_KEPT = 1024
FAILURE_KEPT_S = 2.0

T = TypeVar("T")


class LookupResult(NamedTuple, Generic[T]):
    """The result of a lookup, or the sentence that says why there is none."""

    value: T | None
    problem: str | None = None


class CachedLookup(Generic[T]):
    """Caches lookups by `name`. Times in seconds.

    Results are kept for `keep_s`, failures for FAILURE_KEPT_S; a lookup takes at most `timeout_s`, and `max_running` run
    at a time. `failed` is the message for a failed lookup.
    """

    def __init__(
        self,
        failed: str,
        *,
        keep_s: float,
        timeout_s: float,
        max_running: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failed = failed
        self._keep_s = keep_s
        self._timeout_s = timeout_s
        self._max_running = max_running
        self._clock = clock
        self._kept: BoundedDict[str, tuple[float, LookupResult[T]]] = BoundedDict(MAX_KEPT)
        self._running: dict[str, asyncio.Task[LookupResult[T]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def find(self, name: str, look: Callable[[], Awaitable[T]]) -> LookupResult[T]:
        """The kept result of `name`, else that of the running lookup, else that of a new one, if one may start."""
        kept = self._kept.get(name)
        if kept is not None and self._clock() < kept[0]:
            return kept[1]
        task = self._running.get(name)
        if task is None:
            if len(self._running) >= self._max_running:
                return LookupResult(None, "Too many lookups are in progress; try again soon.")
            task = self._running[name] = asyncio.create_task(self._look(name, look), name="look once")
        await asyncio.wait([task])  # Not the task itself: a cancelled caller would cancel it for the others.
        return LookupResult(None, self._failed) if task.cancelled() else task.result()

    async def _look(self, name: str, look: Callable[[], Awaitable[T]]) -> LookupResult[T]:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = LookupResult(await look())
        except Exception:  # noqa: BLE001  # drivers have no one base for all that can go wrong on the way
            found = LookupResult(None, self._failed)
        finally:
            del self._running[name]
        keep_s = self._keep_s if found.problem is None else FAILURE_KEPT_S
        self._kept.pop(name, None)
        self._kept[name] = (self._clock() + keep_s, found)
        return found

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
