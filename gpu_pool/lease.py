"""Keeps the lease of one claimed batch alive from claim until its end is in Redis, and so hears who left it.

Renewal never outlives the model's cap: the watchdog ends a batch without progress, and with it this lease.
"""

import asyncio
from contextlib import suppress

from gpu_pool.batch_streams import BatchStreams
from scheduler.errors import RedisUnavailable
from scheduler.protocol.batches import Batches


class Lease:
    """Renews every `every_s` seconds, from its making until `stop`. A batch that ends before that costs a timer only."""

    def __init__(self, batches: Batches, batch_id: str, token: str, every_s: float, streams: BatchStreams) -> None:
        self._batches = batches
        self._batch_id = batch_id
        self._token = token
        self._every_s = every_s
        self._streams = streams
        self._renewal: asyncio.Task[None] | None = None
        self._stopped = False
        self.lost = False
        """The batch belongs to somebody else by now: its work must be dropped."""
        self._wait()

    def stop(self) -> None:
        """Renew no more."""
        self._stopped = True
        self._timer.cancel()

    async def close(self) -> None:
        """Stop, and let a renewal that is under way end."""
        self.stop()
        if self._renewal is not None:
            await self._renewal

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._due)

    def _due(self) -> None:
        self._renewal = asyncio.create_task(self._renew(), name="lease")

    async def _renew(self) -> None:
        with suppress(RedisUnavailable):  # The next tick is the retry; the lease spans several.
            found = await self._batches.renew(self._batch_id, self._token, len(self._streams.members))
            self.lost = found is False
            if isinstance(found, frozenset):
                self._streams.only(found)
        if not self.lost and not self._stopped:
            self._wait()
