"""The list of dead letters in Redis, by which health counts them; the letters themselves are rows in PostgreSQL."""

from collections.abc import Sequence

from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys

IDS_A_CALL = 20
"""Each costs a walk over a list of up to ten thousand, a quarter of a millisecond in which Redis serves nobody else."""


class DeadList:
    """The list of one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def remove(self, ids: Sequence[str]) -> None:
        """Take these ids out, wherever they stand. Raises RedisUnavailable."""
        for at in range(0, len(ids), IDS_A_CALL):
            async with bounded():
                pipeline = self._client.pipeline(transaction=False)
                for request_id in ids[at : at + IDS_A_CALL]:
                    pipeline.lrem(self._keys.dlq, 0, request_id)
                await pipeline.execute()
