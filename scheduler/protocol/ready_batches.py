"""The blocking read of `batch_queue`, the ids of ready batches."""

from typing import Any

from redis.asyncio import Redis

from scheduler.redis_client.connections import blocking_read, bounded, pipelined
from scheduler.redis_client.keys import Keys


class ReadyBatches:
    """The blocking read of `batch_queue`.

    It pops only an id: the batch is in `inflight` under a lease, so a pop that is lost with its worker costs the time of a
    lease, and no request.
    """

    def __init__(self, blocking: Redis, keys: Keys, block_s: float = 1.0) -> None:
        self._client = blocking
        self._key = keys.batch_queue
        self._block_s = block_s

    async def pop(self) -> str | None:
        """The next ready batch, or None after `block_s`. Raises RedisUnavailable, at the latest one second after that."""
        found: Any = await blocking_read(self._client, b"BLPOP", self._key, self._block_s, block_s=self._block_s)
        return str(found[1].decode()) if found else None

    async def unblock(self) -> None:
        """Unblock a waiting `pop` at the server; it returns what it has, or None. Raises RedisUnavailable."""
        client_id = pipelined(self._client).client_id
        if client_id is not None:
            async with bounded(self._client):
                await self._client.client_unblock(client_id)

    def hang_up(self) -> None:
        """Close the connection of a waiting `pop` while Redis is unavailable: it raises RedisUnavailable."""
        pipelined(self._client).close()
