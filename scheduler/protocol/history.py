"""The dashboard history in Redis: the last 60 minutes, one packed point every two seconds.

One gateway writes at a time, while it renews a lock. If two gateways hold it for a short time, the history has extra
points. The content of a point is opaque here.
"""

from collections.abc import Sequence
from typing import cast

from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

STEP_MS = 2000
KEEP_MS = 60 * 60_000
MAX_POINTS = KEEP_MS // STEP_MS
TURN_MS = 5000


def _history_add(point: bytes, max_points: int, keep_ms: int) -> None: ...
def _history_refill(keep_ms: int, points: Sequence[bytes]) -> None: ...


class HistoryStore:
    """The history of one pool. All methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, gateway_id: str) -> None:
        self._client = client
        self._keys = keys
        self._gateway_id = gateway_id
        self._add = Script("history_add", _history_add, client, keys)
        self._refill = Script("history_refill", _history_refill, client, keys)

    async def has_turn(self) -> bool:
        """Acquire or renew the lock. Returns whether this gateway holds it."""
        key = self._keys.history_turn
        async with bounded(self._client):
            if await self._client.set(key, self._gateway_id, nx=True, px=TURN_MS):
                return True
            if await self._client.get(key) != self._gateway_id.encode():
                return False
            await self._client.pexpire(key, TURN_MS)
            return True

    async def add(self, point: bytes) -> int:
        """Add the newest point. Returns the number of points."""
        return int(await self._add(point, MAX_POINTS, KEEP_MS))

    async def add_older(self, points: Sequence[bytes]) -> None:
        """After Redis lost its data: add the previous points, the newest first."""
        await self._refill(KEEP_MS, points[: MAX_POINTS - 1])

    async def read(self) -> list[bytes]:
        """All points, the oldest first."""
        async with bounded(self._client):
            points = cast("list[bytes]", await self._client.lrange(self._keys.history, 0, MAX_POINTS - 1))
        return points[::-1]

    async def release(self) -> None:
        """Release the lock, so that another gateway can write at once."""
        key = self._keys.history_turn
        async with bounded(self._client):
            if await self._client.get(key) == self._gateway_id.encode():
                await self._client.delete(key)
