"""Requests that nobody waits for any more, ended in Redis together: one call for all that gathered meanwhile.

What cannot be ended because Redis is away is kept for a while and tried again; it is bounded in number and age,
because the scheduler ends by deadline whatever is lost here.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from scheduler.errors import ErrorCode, TierlaneError
from scheduler.fault_log import log_fault
from scheduler.protocol.cancellation import Cancellation, Cancelled
from scheduler.protocol.replies import Reply

MAX_IDS = 10_000
CALL_SIZE = 256
KEEP_S = 10.0  # Longer than any request lives.
RETRY_S = 0.25


class CancelCall(Protocol):
    """`Endings`, as far as the gateway uses it."""

    async def cancel(self, requests: Sequence[Cancelled]) -> list[Reply | None]: ...


class Cancels:
    """The ids to end, each with its code."""

    def __init__(self, endings: CancelCall, clock: Callable[[], float] = time.monotonic) -> None:
        self._endings = endings
        self._clock = clock
        self._ids: dict[str, tuple[Cancellation, float]] = {}
        self._wake = asyncio.Event()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._ids)

    def add(
        self, request_id: str, code: ErrorCode, *, running: bool = False, told: bool = False, used: int = 0
    ) -> None:
        """End this request soon, as `Cancellation` says; CANCELLED leaves one that runs alone, unless `running`.

        The oldest is dropped and counted when there are too many.
        """
        if len(self._ids) >= MAX_IDS:
            del self._ids[next(iter(self._ids))]
            self.dropped += 1
        self._ids[request_id] = Cancellation(request_id, code, running, told, used), self._clock()
        self._wake.set()

    async def flush(self) -> bool:
        """One call for the oldest ids. False when Redis is away and they are kept."""
        self._forget_old()
        batch = [cancellation for cancellation, _ in islice(self._ids.values(), CALL_SIZE)]
        try:
            await self._endings.cancel(batch)
        except TierlaneError:
            return False
        for cancellation in batch:
            if (kept := self._ids.get(cancellation.id)) is not None and kept[0] is cancellation:
                del self._ids[cancellation.id]
        return True

    async def run(self) -> None:
        """Flush whenever something was added; never ends by itself."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._ids:
                if not await self._flushed():
                    await asyncio.sleep(RETRY_S)

    async def _flushed(self) -> bool:
        try:
            return await self.flush()
        except Exception as error:  # noqa: BLE001  # no fault may end this loop
            log_fault("ending requests failed", error)
            return False

    def _forget_old(self) -> None:
        before = self._clock() - KEEP_S
        while self._ids and next(iter(self._ids.values()))[1] < before:
            del self._ids[next(iter(self._ids))]
            self.dropped += 1
