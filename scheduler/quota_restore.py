"""What was spent of quotas, told to a Redis that came back empty: the audit remembers it, Redis does not."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from scheduler.connections import bounded
from scheduler.keys import Keys
from scheduler.scripts import Script

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
        async with bounded():
            epoch, told = await self._client.mget(*self._names)
        return epoch is not None and epoch != told

    async def tell(self, spent: Sequence[QuotaSpent]) -> int:
        """Raise what stands lower; how many did."""
        raised = 0
        for start in range(0, max(1, len(spent)), CHUNK):
            chunk = spent[start : start + CHUNK]
            raised += int(await self._script(_encode(chunk), int(start + CHUNK >= len(spent))))
        return raised
