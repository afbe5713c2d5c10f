"""A gateway without HTTP, for as long as a command runs: it lives in Redis, submits, and reads what became of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from uuid_utils import uuid7

from gateway.dead_letter_rerun import NotRerun, Reruns
from scheduler.errors import RedisUnavailable
from scheduler.protocol.pool_view import GatewayStats
from scheduler.protocol.presence import Presence
from scheduler.redis_client.keys import Keys
from tierlane.dlq.reach import DlqError

BEAT_S = 0.5


class SmallGateway(Reruns):
    """One such gateway on one pool; `total_ms` is what its requests have. All methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, total_ms: int, gone_ms: int) -> None:
        self._id = f"gw-{uuid7().hex}"
        self._life = Presence(client, keys, gone_ms=gone_ms)
        super().__init__(client, keys, self._id, total_ms, gone_ms)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Live until the end of the block. Raises DlqError where no worker is healthy."""
        try:
            await self.check_workers()
        except NotRerun as error:
            raise DlqError(str(error)) from error
        await self._beat()
        beating = asyncio.create_task(self._keep_beating())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            with contextlib.suppress(RedisUnavailable):
                await self._life.gateway_gone(self._id)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(RedisUnavailable):
                await self._beat()

    async def _beat(self) -> None:
        await self._life.gateway_beat(GatewayStats(self._id, 0.0, {}))
