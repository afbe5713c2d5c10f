"""Coalesced calls: everything that arrives while the previous call is under way shares the next one.

No timer and no added wait when idle; no loop of its own either: a run begins with the first who asks, and ends when
nobody waits.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

MOST_PENDING = 4096


class TooManyWait(Exception):
    """More wait for the next call than may."""


class Together(Generic[T, R]):
    """`call` takes up to `size` items and gives an answer to each, in order; one that is an exception is raised."""

    def __init__(self, call: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]], size: int = 256) -> None:
        self._call = call
        self._size = size
        self._pending: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._running: asyncio.Task[None] | None = None
        self.calls = 0

    async def ask(self, item: T) -> R:
        """The answer for this item. Raises TooManyWait, and what the call raises."""
        if len(self._pending) >= MOST_PENDING:
            raise TooManyWait
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.append((item, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="coalesced calls")
        return await future

    async def _run(self) -> None:
        try:
            while self._pending:
                group = [self._pending.popleft() for _ in range(min(self._size, len(self._pending)))]
                await self._answer([(item, future) for item, future in group if not future.done()])
        finally:
            self._running = None

    async def _answer(self, group: list[tuple[T, "asyncio.Future[R]"]]) -> None:
        if not group:
            return
        self.calls += 1
        try:
            answers: Sequence[R | Exception] = await self._call([item for item, _ in group])
        except asyncio.CancelledError:
            for _, future in group:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to those who wait
            answers = [error] * len(group)
        for (_, future), answer in zip(group, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    async def close(self) -> None:
        """End what is under way; whoever waits is cancelled."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()
