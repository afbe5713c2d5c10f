"""Repair of the indexes in Redis: a key with a wrong type, written by another client, makes all its commands fail.

Such a key is renamed, and its content is rebuilt from the rows of batches and requests, so that no request is lost. Other
indexes are restored by the next heartbeats, or by what gateways send again.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis

from scheduler.protocol.pool_view import with_background
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

REPAIRED = "Redis key "
"""The start of the notices for health."""

KEPT_MS = 7 * 24 * 3_600_000
NOTE_MS = 24 * 3_600_000
PIECE = 500

_encode = msgspec.msgpack.Encoder().encode
log = structlog.get_logger("scheduler")


def _repair(packed_tiers: bytes, keep_ms: int, record_ms: int) -> None: ...
def _rebuild(index: str, packed_ids: bytes, lease_ms: int, accepted_until: int) -> None: ...


class IndexRepair:
    """The index repair of one pool. Raises RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, *, lease_ms: int) -> None:
        self._client = client
        self._prefix = keys.prefix
        self._repairs = keys.repairs
        self._repair = Script("repair", _repair, client, keys)
        self._rebuild = Script("rebuild", _rebuild, client, keys)
        self._lease_ms = lease_ms

    async def repair(self, tiers: Sequence[str]) -> list[str]:
        """Check and repair all indexes. Returns a notice for each recent repair.

        Concurrent calls are harmless: an id that is in a queue twice is served once.
        """
        found, wanted, now_ms = await self._repair(_encode(with_background(tiers)), KEPT_MS, NOTE_MS)
        for name in (raw.decode() for raw in wanted):
            count = await self._built_again(name, int(now_ms))
            async with bounded(self._client):
                await self._client.srem(self._repairs, name)
            log.error("redis_key_repaired", key=self._prefix + name, rebuilt=count)
        prefix, names = self._prefix, [raw.decode() for raw in found]
        renamed = f"had a wrong type: it was renamed to {prefix}bad:"
        return [f"{REPAIRED}{prefix}{name} {renamed}{name}:{int(now_ms)} and rebuilt" for name in names]

    async def _built_again(self, name: str, now_ms: int) -> int:
        if name in ("leases", "batch_queue"):  # Ready batches are pushed again when their lease expires.
            ids, name = [each async for each in self._ids("batch:")], "leases"
        elif name.startswith(("queue:", "backlogs:")):
            name = name.replace("backlogs:", "queue:", 1)
            ids = sorted([each async for each in self._ids("request:")], reverse=True)  # Ids are in order of time.
        else:
            return 0
        count = 0
        for start in range(0, len(ids), PIECE):
            piece = _encode(ids[start : start + PIECE])
            count += int(await self._rebuild(name, piece, self._lease_ms, now_ms))
        return count

    async def _ids(self, kind: str) -> AsyncIterator[str]:
        start, cursor = self._prefix + kind, 0
        pattern = (
            start.replace("{", "[{]").replace("}", "[}]") + "*"
        )  # Names of pools contain no other special characters.
        while True:
            async with bounded(self._client):
                found: Any = await self._client.scan(cursor, match=pattern, count=PIECE)
            cursor, names = found
            for name in names:
                yield name.decode().removeprefix(start)
            if not cursor:
                return
