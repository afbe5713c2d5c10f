"""The audit outbox: entries wait here until PostgreSQL has them. The ledger's auditor is the only reader."""

from collections.abc import Sequence
from hashlib import sha1
from typing import NamedTuple

from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

BAD_CAP = 1000
"""Entries that could not be written are kept for a look, at most so many."""

TAKE_BYTES = 8 << 20
"""A take ends with the entry that fills this: dead letters carry bodies, and the answer must come in a call's time."""


HELD_MS = 10_000
"""So long health may take it from the last take that entries wait on purpose; an auditor takes twice a second."""


class Taken(NamedTuple):
    """What a take came to."""

    held: int  # How many entries the caller holds that are there: those that it named, or 0 where that is not true.
    entries: list[bytes]  # What comes behind them, oldest first.
    more: bool  # Whether more is likely to wait.


def name_of(entry: bytes) -> str:
    """Its hash, by which auditor and Redis tell whether they speak of the same entry."""
    return sha1(entry, usedforsecurity=False).hexdigest()


class Outbox:
    """One auditor's hands on the outbox: take, then drop what is committed. All raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, auditor_id: str) -> None:
        self._client = client
        self._keys = keys
        self._own = keys.auditor_outbox(auditor_id)
        self._auditor_id = auditor_id
        self._take = Script("audit_take", client, keys)
        self._drop = Script("audit_drop", client, keys)

    async def take(self, limit: int, held: int = 0, newest: str = "") -> Taken:
        """Move up to `limit` entries into the own list, dead auditors' first.

        `held`: so many of the oldest in that list are known to the caller, and `newest` is the name of the last of them;
        they are not returned again, unlike others that were taken before and not dropped. Where that is not so, Redis
        was lost or set back: nothing is taken, and all that is there counts as not held. A take ends early behind the
        entry with which it comes to TAKE_BYTES. Only the auditor that holds the lock may call this.
        """
        there, *entries = await self._take(self._auditor_id, limit, TAKE_BYTES, held, newest, HELD_MS)
        full = len(entries) >= limit or sum(map(len, entries)) >= TAKE_BYTES
        return Taken(there, entries, full or there != held)

    async def drop(self, count: int, oldest: str, bad: Sequence[bytes] = ()) -> None:
        """Forget the `count` oldest entries of the own list: they are committed, but for `bad`, kept for a look.

        `oldest`: the name of the first of them; where another one stands there, nothing is dropped.
        """
        await self._drop(self._auditor_id, count, oldest, BAD_CAP, *bad)

    async def depth(self) -> int:
        """Entries that wait, the taken ones included."""
        async with bounded():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.llen(self._keys.outbox)
            pipeline.llen(self._own)
            waiting, taken = await pipeline.execute()
        return int(waiting) + int(taken)
