"""The lease of a claimed batch, renewed from claim until the end is in Redis.

Renewals report cancelled requests. It never outlives the model's cap: the watchdog ends a batch without progress, and
with it this lease.
"""

import asyncio
from contextlib import suppress

from gpu_pool.worker.streams import BatchStreams
from scheduler.errors import RedisUnavailable
from scheduler.protocol.batches import Batches


class Lease:
    """Renews a lease every `every_s` seconds until `stop`. A batch that ends sooner costs one timer only."""

    def __init__(self, batches: Batches, batch_id: str, token: str, every_s: float, streams: BatchStreams) -> None:
        self._batches = batches
        self._batch_id = batch_id
        self._token = token
        self._every_s = every_s
        self._streams = streams
        self._renewal: asyncio.Task[None] | None = None
        self._stopped = False
        self.lost = False
        """Another worker has the batch: the result must be dropped."""
        self._wait()

    def stop(self) -> None:
        """Stop renewing."""
        self._stopped = True
        self._timer.cancel()

    async def close(self) -> None:
        """Stop, and wait for a renewal in progress."""
        self.stop()
        if self._renewal is not None:
            await self._renewal

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._due)

    def _due(self) -> None:
        self._renewal = asyncio.create_task(self._renew(), name="lease")

    async def _renew(self) -> None:
        with suppress(RedisUnavailable):  # The next renewal is the retry; the lease spans several.
            found = await self._batches.renew(self._batch_id, self._token, len(self._streams.members))
            self.lost = found is False
            if isinstance(found, frozenset):
                self._streams.keep_only(found)
        if not self.lost and not self._stopped:
            self._wait()
