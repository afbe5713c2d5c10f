"""Whether batches are wanted now: closed while the server asks to be left alone, and while it is away or refuses us.

After the first it opens by itself; after the second when a look at the endpoint succeeds. Each change is told.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gpu_pool.endpoint.pauses import Pauses

Tell = Callable[[bool, str, bool], None]
"""Told whether batches are wanted, and if not, why in one sentence, and whether for a moment only."""

BUSY = "The endpoint takes no more requests for now."


def _nobody(wanted: bool, why: str, brief: bool) -> None:  # noqa: FBT001 - one who is told
    """Whoever has no supervisor to tell."""


class Door:
    """`look` returns why the endpoint cannot be used, or "" where it can."""

    def __init__(self, look: Callable[[], Awaitable[str]]) -> None:
        self._look = look
        self._pauses = Pauses()
        self._work: asyncio.Task[None] | None = None
        self.tell: Tell = _nobody
        self.shut = ""
        """Why no batch is wanted; "": the door is open."""

    def worked(self) -> None:
        """A batch was answered."""
        self._pauses.worked()

    def busy(self, asked_s: float | None) -> None:
        """The server wants to be left alone, for so many seconds if it said so."""
        if not self.shut:
            wait_s = self._pauses.busy_s(asked_s)
            self._shut(BUSY, self._wait(wait_s), brief=self._pauses.brief(wait_s))

    def failed(self, reason: str) -> None:
        """A batch was lost, or reached nobody."""
        if self._pauses.failed():
            self.broken(reason)

    def broken(self, reason: str) -> None:
        """Nothing will go well before something changes there."""
        if not self.shut:
            self._shut(reason, self._wait_for_it(), brief=False)

    async def close(self) -> None:
        """Stop waiting."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    def _shut(self, reason: str, work: Coroutine[Any, Any, None], *, brief: bool) -> None:
        self.shut = reason
        self._work = asyncio.create_task(work, name="door")
        self.tell(False, reason, brief)  # noqa: FBT003 - one of two words

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._open()

    async def _wait_for_it(self) -> None:
        while True:
            await asyncio.sleep(self._pauses.look_s())
            if await self._is_well():
                self._open()
                return

    async def _is_well(self) -> bool:
        try:
            return not await self._look()
        except Exception:  # noqa: BLE001 - whatever it is, the next look may go well; without one the door stays shut
            traceback.print_exc()
            return False

    def _open(self) -> None:
        self.shut = ""
        self.tell(True, "", False)  # noqa: FBT003 - see above
