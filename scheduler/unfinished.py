"""Pools in which something may still wait: a set in Redis, for processes that start when no model names the pool any more.

It lives where the queues live, so it is lost only together with what it speaks of. Schedulers write it, gateways read it.
"""

from collections.abc import Collection
from typing import Any

from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys, is_pool_name


class Unfinished:
    """All raise RedisUnavailable."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._key = Keys().pools

    async def pools(self) -> set[str]:
        """The pools that somebody should serve, named by a model or not."""
        async with bounded():
            members: Any = await self._client.smembers(self._key)
        return {name for name in (member.decode("utf-8", "replace") for member in members) if is_pool_name(name)}

    async def note(self, kept: Collection[str], over: Collection[str]) -> None:
        """Add some, and take others out."""
        async with bounded():
            pipeline = self._client.pipeline(transaction=True)
            if kept:
                pipeline.sadd(self._key, *kept)
            if over:
                pipeline.srem(self._key, *over)
            await pipeline.execute()

    async def is_empty(self, keys: Keys, tiers: Collection[str]) -> bool:
        """Whether in this pool nothing waits, runs, or is still to be written into the audit."""
        async with bounded():
            pipeline = self._client.pipeline(transaction=True)
            for name in (*map(keys.queue, tiers), keys.batch_queue, keys.outbox):
                pipeline.llen(name)
            for name in (keys.leases, keys.sharing):
                pipeline.zcard(name)
            pipeline.smembers(keys.auditors)
            *sizes, auditors = await pipeline.execute()
            for auditor in auditors:
                pipeline.llen(keys.auditor_outbox(auditor.decode()))
            return not any(sizes) and not any(await pipeline.execute())
