"""Repair of the indexes in Redis: a key of another type than ours, whoever wrote it, makes every command on it fail for good.

It is set aside, and what stands in it is found again in the rows of batches and requests, so that no request is lost. Other
indexes fill themselves: with the next heartbeats, or with what gateways tell again.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis

from scheduler.protocol.batches import LEASE_MS
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

REPAIRED = "Redis key "
"""What the sentences for health begin with."""

KEPT_MS = 7 * 24 * 3_600_000
NOTE_MS = 24 * 3_600_000
PIECE = 500

_encode = msgspec.msgpack.Encoder().encode
log = structlog.get_logger("scheduler")


class IndexRepair:
    """Of one pool. Raises RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, *, lease_ms: int = LEASE_MS) -> None:
        self._client = client
        self._prefix = keys.prefix
        self._repairs = keys.repairs
        self._repair = Script("repair", client, keys)
        self._rebuild = Script("rebuild", client, keys)
        self._lease_ms = lease_ms

    async def repair(self, tiers: Sequence[str]) -> list[str]:
        """Look once; sentences about what was repaired. Two at the same time do no harm: an id that stands in a queue twice
        is served once.
        """
        found, wanted, now_ms = await self._repair(_encode(tiers), KEPT_MS, NOTE_MS)
        for name in (raw.decode() for raw in wanted):
            count = await self._built_again(name, int(now_ms))
            async with bounded():
                await self._client.srem(self._repairs, name)
            log.error("redis_key_repaired", key=self._prefix + name, rebuilt=count)
        return [_sentence(self._prefix, raw.decode(), int(now_ms)) for raw in found]

    async def _built_again(self, name: str, now_ms: int) -> int:
        if name in ("leases", "batch_queue"):  # What should stand ready is pushed again when its lease is over.
            ids, name = [each async for each in self._ids("batch:")], "leases"
        elif name.startswith("queue:"):
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
        while True:
            async with bounded():
                found: Any = await self._client.scan(cursor, match=_literal(start) + "*", count=PIECE)
            cursor, names = found
            for name in names:
                yield name.decode().removeprefix(start)
            if not cursor:
                return


def _literal(text: str) -> str:
    """For a pattern of Redis: pools have no other letters that mean something there."""
    return text.replace("{", "[{]").replace("}", "[}]")


def _sentence(prefix: str, name: str, now_ms: int) -> str:
    return f"{REPAIRED}{prefix}{name} had another type: it was set aside as {prefix}bad:{name}:{now_ms} and built again"
