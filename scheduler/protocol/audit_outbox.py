"""The audit outbox in Redis: its entries until they are in PostgreSQL, and its lag.

Only the ledger's auditor reads entries. The lag is the age of the oldest entry that is not in PostgreSQL yet. Entries that
the auditor holds until requests have ended do not count.
"""

from collections.abc import Sequence
from hashlib import sha1
from typing import NamedTuple

from redis.asyncio import Redis

from scheduler.protocol.audit_records import EndedRecord, decode_entry
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script
from scheduler.request_id import created_ms

BAD_CAP = 1000
"""The maximum number of stored entries that could not be written to PostgreSQL."""

TAKE_BYTES = 8 << 20
"""A take ends with the entry that reaches this size: dead letters contain bodies, and the call has a timeout."""

HELD_MS = 10_000
"""How long after a take its held entries do not count as lag; an auditor takes twice a second."""


class Taken(NamedTuple):
    """The result of a take."""

    held: int  # The number of held entries that Redis confirms: all that the caller named, or 0.
    entries: list[bytes]  # The entries after those, the oldest first.
    more: bool  # Whether there are probably more.


def name_of(entry: bytes) -> str:
    """The hash of an entry, by which the auditor names it to Redis."""
    return sha1(entry, usedforsecurity=False).hexdigest()


def _audit_take(*, auditor_id: str, limit: int, max_bytes: int, held: int, newest_name: str, held_ms: int) -> None: ...
def _audit_drop(*, auditor_id: str, count: int, oldest_name: str, max_bad: int, bad: Sequence[bytes]) -> None: ...


class Outbox:
    """One auditor's access to the outbox: take entries, then drop committed ones. All methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, auditor_id: str) -> None:
        self._client = client
        self._keys = keys
        self._own = keys.auditor_outbox(auditor_id)
        self._auditor_id = auditor_id
        self._take = Script("audit_take", _audit_take, client, keys)
        self._drop = Script("audit_drop", _audit_drop, client, keys)

    async def take(self, limit: int, held: int = 0, newest: str = "") -> Taken:
        """Move up to `limit` entries into the auditor's own list, those of dead auditors first.

        `held`: the caller already has this many of the oldest entries in that list, and `newest` is the name of the last of
        them. They are not returned again, unlike others that were taken before and not dropped. If Redis does not confirm them,
        it lost data or was set back: then nothing is taken, and the result has `held` 0. A take ends early with the entry that
        reaches TAKE_BYTES. Only the auditor that holds the lock may call this.
        """
        there, *entries = await self._take(
            auditor_id=self._auditor_id,
            limit=limit,
            max_bytes=TAKE_BYTES,
            held=held,
            newest_name=newest,
            held_ms=HELD_MS,
        )
        full = len(entries) >= limit or sum(map(len, entries)) >= TAKE_BYTES
        return Taken(there, entries, full or there != held)

    async def drop(self, count: int, oldest: str, bad: Sequence[bytes] = ()) -> None:
        """Remove the `count` oldest entries of the own list, because they are committed; `bad` ones are stored separately.

        `oldest`: the name of the first of them. If the list starts with another entry, nothing is removed.
        """
        await self._drop(auditor_id=self._auditor_id, count=count, oldest_name=oldest, max_bad=BAD_CAP, bad=bad)

    async def depth(self) -> int:
        """The number of entries, including taken ones."""
        async with bounded(self._client):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.llen(self._keys.outbox)
            pipeline.llen(self._own)
            waiting, taken = await pipeline.execute()
        return int(waiting) + int(taken)


class AuditLag:
    """Reads the oldest entries of the outbox and of the auditors' lists. Not called for requests of customers."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def oldest_ms(self) -> int | None:
        """When the oldest entry was written, in ms since the epoch; None if there is none.

        Raises RedisUnavailable.
        """
        async with bounded(self._client):
            members: set[bytes] = await self._client.smembers(self._keys.auditors)  # type: ignore[assignment]
            auditors = [member.decode() for member in members]
            held = (
                await self._client.mget([self._keys.auditor_held(auditor) for auditor in auditors]) if auditors else []
            )
            pipeline = self._client.pipeline(transaction=False)
            for auditor, count in zip(auditors, held, strict=True):
                pipeline.lindex(self._keys.auditor_outbox(auditor), -1 - int(count or 0))
            pipeline.lindex(self._keys.outbox, -1)
            oldest: list[bytes | None] = await pipeline.execute()
        times = [time for entry in oldest if entry and (time := written_ms(entry)) is not None]
        return min(times, default=None)


def written_ms(entry: bytes) -> int | None:
    """When an entry was written, according to its first record; None if it cannot be read."""
    for record in decode_entry(entry)[0]:
        if isinstance(record, EndedRecord):
            return record.ended_at_ms
        try:
            return created_ms(record.id)
        except ValueError:
            continue
    return None
