"""The audit outbox: entries wait here until PostgreSQL has them. The ledger's auditor is the only reader."""

from collections.abc import Sequence
from hashlib import sha1

from redis.asyncio import Redis

from scheduler.connections import bounded
from scheduler.keys import Keys
from scheduler.scripts import Script

BAD_CAP = 1000
"""Entries that could not be written are kept for a look, at most so many."""

TAKE_BYTES = 8 << 20
"""A take ends with the entry that fills this: dead letters carry bodies, and the answer must come in a call's time."""


class Outbox:
    """One auditor's hands on the outbox: take, then drop what is committed. All raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, auditor_id: str) -> None:
        self._client = client
        self._keys = keys
        self._own = keys.auditor_outbox(auditor_id)
        self._auditor_id = auditor_id
        self._oldest = ""
        self._take = Script("audit_take", client, keys)
        self._drop = Script("audit_drop", client, keys)

    async def take(self, limit: int) -> list[bytes]:
        """Move up to `limit` entries into the own list, dead auditors' first, and return that list, oldest first.

        It ends early behind the entry with which they come to TAKE_BYTES. Entries taken before and not dropped are
        returned again. Only the auditor that holds the lock may call this.
        """
        entries: list[bytes] = await self._take(self._auditor_id, limit, TAKE_BYTES)
        self._oldest = sha1(entries[0], usedforsecurity=False).hexdigest() if entries else ""
        return entries

    async def drop(self, count: int, bad: Sequence[bytes] = ()) -> None:
        """Forget the `count` oldest entries of the last take: they are committed, but for `bad`, kept for a look."""
        await self._drop(self._auditor_id, count, self._oldest, BAD_CAP, *bad)

    async def depth(self) -> int:
        """Entries that wait, the taken ones included."""
        async with bounded():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.llen(self._keys.outbox)
            pipeline.llen(self._own)
            waiting, taken = await pipeline.execute()
        return int(waiting) + int(taken)
