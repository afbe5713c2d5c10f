"""Requests that nobody waits for any more, ended in Redis together: one call for all that gathered meanwhile.

What cannot be ended because Redis is away is kept for a while and tried again; it is bounded in number and age,
because the scheduler ends by deadline whatever is lost here.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from scheduler.endings import Cancellation
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.fault_log import log_fault
from scheduler.replies import Reply

MAX_IDS = 10_000
CALL_SIZE = 256
KEEP_S = 10.0  # Longer than any request lives.
RETRY_S = 0.25


class CancelCall(Protocol):
    """`Endings`, as far as the gateway uses it."""

    async def cancel(self, requests: Sequence[Cancellation]) -> list[Reply | None]: ...


class Cancels:
    """The ids to end, each with its code."""

    def __init__(self, endings: CancelCall, clock: Callable[[], float] = time.monotonic) -> None:
        self._endings = endings
        self._clock = clock
        self._ids: dict[str, tuple[ErrorCode, bool, float]] = {}
        self._wake = asyncio.Event()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, request_id: str, code: ErrorCode, *, running: bool = False) -> None:
        """End this request soon; CANCELLED leaves one that runs alone, unless `running`.

        The oldest is dropped and counted when there are too many.
        """
        if len(self._ids) >= MAX_IDS:
            del self._ids[next(iter(self._ids))]
            self.dropped += 1
        self._ids[request_id] = (code, running, self._clock())
        self._wake.set()

    async def flush(self) -> bool:
        """One call for the oldest ids. False when Redis is away and they are kept."""
        self._forget_old()
        batch: list[Cancellation] = [
            (request_id, code, True) if running else (request_id, code)
            for request_id, (code, running, _) in islice(self._ids.items(), CALL_SIZE)
        ]
        try:
            await self._endings.cancel(batch)
        except TierlaneError:
            return False
        for request_id, *_ in batch:
            self._ids.pop(request_id, None)
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
        while self._ids and next(iter(self._ids.values()))[2] < before:
            del self._ids[next(iter(self._ids))]
            self.dropped += 1
