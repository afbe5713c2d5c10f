"""What was spent of quotas, told to a Redis that came back empty: the audit remembers it, Redis does not."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

CHUNK = 1000
_encode = msgspec.msgpack.Encoder().encode


class QuotaSpent(NamedTuple):
    """How many requests count against one quota of one customer, in the window that began at `began_ms` (UTC)."""

    customer_id: str
    period: str  # Such as 1day.
    began_ms: int
    spent: int


class QuotaRestore:
    """The quota_restore script on one pool. Both methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._names = (keys.epoch, keys.quotas_told)
        self._script = Script("quota_restore", client, keys)

    async def wanted(self) -> bool:
        """Whether this Redis has a beginning since which nobody has told it."""
        epoch, told = await self._look()
        return epoch is not None and epoch != told

    async def tell(self, spent: Sequence[QuotaSpent]) -> int:
        """Raise what stands lower; how many did. One that is emptied meanwhile still wants to be told."""
        epoch, _ = await self._look()
        raised = 0
        for start in range(0, max(1, len(spent)), CHUNK):
            is_last = start + CHUNK >= len(spent)
            raised += await self._tell_some(spent[start : start + CHUNK], epoch or b"" if is_last else b"")
        return raised

    async def _look(self) -> Sequence[Any]:
        """In bytes, None where it is not known: when this Redis began, and of which beginning it was told."""
        async with bounded():
            return await self._client.mget(*self._names)

    async def _tell_some(self, chunk: Sequence[QuotaSpent], told: bytes) -> int:
        return int(await self._script(_encode(chunk), told))
