"""The dashboard history in Redis: packed points, one every two seconds for 60 minutes, and one every five minutes for a week.

One gateway writes at a time, while it renews a lock. If two gateways hold it for a short time, the history has extra
points. The content of a point is opaque here.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

STEP_MS = 2000
KEEP_MS = 60 * 60_000
MAX_POINTS = KEEP_MS // STEP_MS
TURN_MS = 5000


class Resolution(NamedTuple):
    """One list of points: time between two of them, and how long they are kept."""

    name: Literal["hour", "week"]
    step_ms: int
    keep_ms: int

    @property
    def max_points(self) -> int:
        """The length of the list."""
        return self.keep_ms // self.step_ms


HOUR = Resolution("hour", STEP_MS, KEEP_MS)
WEEK = Resolution("week", 5 * 60_000, 7 * 24 * 60 * 60_000)


def _history_add(point: bytes, max_points: int, keep_ms: int, resolution: str) -> None: ...
def _history_refill(keep_ms: int, resolution: str, points: Sequence[bytes]) -> None: ...


class HistoryStore:
    """The history of one pool in one resolution. All methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, gateway_id: str, resolution: Resolution = HOUR) -> None:
        self._client = client
        self._keys = keys
        self._key = keys.history if resolution is HOUR else keys.history_week
        self._resolution = resolution
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
        name, _, keep_ms = self._resolution
        return int(await self._add(point, self._resolution.max_points, keep_ms, name))

    async def add_older(self, points: Sequence[bytes]) -> None:
        """After Redis lost its data: add the previous points, the newest first."""
        name, _, keep_ms = self._resolution
        await self._refill(keep_ms, name, points[: self._resolution.max_points - 1])

    async def read(self) -> list[bytes]:
        """All points, the oldest first."""
        async with bounded(self._client):
            points = cast("list[bytes]", await self._client.lrange(self._key, 0, self._resolution.max_points - 1))
        return points[::-1]

    async def newest(self) -> bytes | None:
        """The newest point; None if there is none."""
        async with bounded(self._client):
            return cast("bytes | None", await self._client.lindex(self._key, 0))

    async def release(self) -> None:
        """Release the lock, so that another gateway can write at once."""
        key = self._keys.history_turn
        async with bounded(self._client):
            if await self._client.get(key) == self._gateway_id.encode():
                await self._client.delete(key)
