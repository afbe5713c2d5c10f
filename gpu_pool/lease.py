"""Keeps the lease of one claimed batch alive from claim until its end is in Redis.

Renewal never outlives the model's cap: the watchdog ends a batch without progress, and with it this lease.
"""

import asyncio

from scheduler.batches import Batches
from scheduler.errors import RedisUnavailable


class Lease:
    """Renews every `every_s` seconds, from its making until `stop`."""

    def __init__(self, batches: Batches, batch_id: str, token: str, every_s: float) -> None:
        self._batches = batches
        self._batch_id = batch_id
        self._token = token
        self._every_s = every_s
        self._stopped = asyncio.Event()
        self._task = asyncio.create_task(self._keep(), name="lease")
        self.lost = False
        """The batch belongs to somebody else by now: its work must be dropped."""

    def stop(self) -> None:
        """Renew no more."""
        self._stopped.set()

    async def close(self) -> None:
        """Stop, and let a renewal that is under way end: a cancelled Redis call would cost its connection."""
        self.stop()
        await self._task

    async def _keep(self) -> None:
        while not await self._stopped_within():
            try:
                self.lost = not await self._batches.renew(self._batch_id, self._token)
            except RedisUnavailable:
                continue  # The next tick is the retry; the lease spans several.
            if self.lost:
                return

    async def _stopped_within(self) -> bool:
        try:
            async with asyncio.timeout(self._every_s):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True
