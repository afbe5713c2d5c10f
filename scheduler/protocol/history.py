"""The last quarter of an hour as gateways saw it, one packed moment every two seconds; who opens a page later sees it too.

One gateway writes at a time: it holds the turn for as long as it renews it. Two that both believe so for a moment write two
moments where one would do, and nothing worse. What is in a moment is its writer's business.
"""

from collections.abc import Sequence
from typing import cast

from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

STEP_MS = 2000
KEEP_MS = 15 * 60_000
MOMENTS = KEEP_MS // STEP_MS
TURN_MS = 5000


class HistoryStore:
    """The history of one pool's Redis. All raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, gateway_id: str) -> None:
        self._client = client
        self._keys = keys
        self._gateway_id = gateway_id
        self._add = Script("history_add", client, keys)
        self._refill = Script("history_refill", client, keys)

    async def has_turn(self) -> bool:
        """Whether this gateway is the one that writes; the turn is taken or renewed."""
        key = self._keys.history_turn
        async with bounded():
            if await self._client.set(key, self._gateway_id, nx=True, px=TURN_MS):
                return True
            if await self._client.get(key) != self._gateway_id.encode():
                return False
            await self._client.pexpire(key, TURN_MS)
            return True

    async def add(self, moment: bytes) -> int:
        """Keep one more, the newest; how many there are."""
        return int(await self._add(moment, MOMENTS, KEEP_MS))

    async def add_older(self, moments: Sequence[bytes]) -> None:
        """After Redis came back empty: what came before, the newest first."""
        await self._refill(KEEP_MS, *moments[: MOMENTS - 1])

    async def read(self) -> list[bytes]:
        """All that is kept, the oldest first."""
        async with bounded():
            kept = cast("list[bytes]", await self._client.lrange(self._keys.history, 0, MOMENTS - 1))
        return kept[::-1]

    async def give_up(self) -> None:
        """Let another gateway write at once."""
        key = self._keys.history_turn
        async with bounded():
            if await self._client.get(key) == self._gateway_id.encode():
                await self._client.delete(key)
