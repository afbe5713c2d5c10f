"""Requests that end without a worker: cancelled, expired and reaped ones; and the list of dead letters.

Health counts dead letters by the list in Redis; the dead letters themselves are rows in PostgreSQL. The stored rows of jobs
are released here once their results are in PostgreSQL.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from scheduler.errors import ErrorCode
from scheduler.protocol.batches import BATCH_KEEP_MS, RETRY_BUDGET
from scheduler.protocol.followers import Followers
from scheduler.protocol.pool_view import with_background
from scheduler.protocol.replies import Reply, readable
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

REAP_LIMIT = 100
"""Batches per call, so that many expired leases (after a clock jump, for example) do not block Redis."""

EXPIRE_LIMIT = 256
"""Ids per tier and call."""

STORED_KEEP_MS = 30_000
"""Lifetime of a job's row once its result is in PostgreSQL; the same as of other rows after their deadline."""

_encode = msgspec.msgpack.Encoder().encode

IDS_A_CALL = 20
"""Each id costs a search of a list of up to ten thousand, 0.25 ms in which Redis serves no other call."""


class Cancellation(NamedTuple):
    """A request to cancel, and its error code.

    `running`: with CANCELLED, end it even while it runs; its worker then stops. `delivered`: the client already got this code as
    response, which overrides another end. `used`: delivered tokens of its stream.
    """

    id: str
    code: ErrorCode
    running: bool = False
    delivered: bool = False
    used: int = 0


Cancelled = Cancellation | tuple[str, ErrorCode] | tuple[str, ErrorCode, bool]


class Reaped(NamedTuple):
    """The numbers of batches that one reaper pass processed."""

    renewed: int
    pushed_again: int
    retried: int
    unknown: int


def _cancel(packed_requests: bytes) -> None: ...
def _expire(packed_tiers: bytes, limit: int) -> None: ...
def _reap(
    *, limit: int, max_losses: int, min_left_ms: int, lease_ms: int, keep_ms: int, pass_ms: int, standing_in: int
) -> None: ...
def _stored(keep_ms: int, packed_ids: bytes) -> None: ...


class Terminations:
    """The scripts cancel, expire and reap of one pool."""

    def __init__(self, client: Redis, keys: Keys, *, lease_ms: int) -> None:
        self._cancel = Script("cancel", _cancel, client, keys)
        self._expire = Script("expire", _expire, client, keys)
        self._reap = Script("reap", _reap, client, keys)
        self._stored = Script("stored", _stored, client, keys)
        self._followers = Followers(client, keys)
        self._lease_ms = lease_ms
        self.damaged = 0
        """Recorded rows that scripts could not read, as of the last `expire`; at most the newest 1,000."""

    async def cancel(self, requests: Sequence[Cancelled]) -> list[Reply | None]:
        """End each request as failed with its code, unless it has ended already.

        Returns the stored reply, new or earlier; None if the request is unknown, or was left running because the code is
        CANCELLED (the batch is finished and its result discarded).
        """
        if not requests:
            return []
        stored: list[bytes] = await self._cancel(_encode(requests))
        return [readable(reply) for reply in stored]

    async def stored(self, ids: Sequence[str], keep_ms: int = STORED_KEEP_MS) -> int:
        """The results of these jobs are in PostgreSQL: keep their rows for `keep_ms`, or as long as an Idempotency-Key refers
        to them. Returns how many of them have ended in Redis. Raises RedisUnavailable.
        """
        return int(await self._stored(keep_ms, _encode(ids))) if ids else 0

    async def expire(self, tiers: Sequence[str]) -> tuple[int, int]:
        """End requests over their queue timeout. Returns (ended requests, removed dead entries). Also ends remaining followers."""
        ended, swept, followers_left, self.damaged = await self._expire(_encode(with_background(tiers)), EXPIRE_LIMIT)
        if followers_left:
            await self._followers.share_all()
        return ended, swept

    async def reap(self, min_left_ms: int, pass_ms: int = 100, *, standing_in: bool = False) -> Reaped:
        """Retry or end every batch whose lease expired; requests with less time left than `min_left_ms` end.

        `pass_ms`: the interval of passes. If a pass is late by half a lease, running batches get one more lease.
        `standing_in`: called by a gateway, because no scheduler is running.
        """
        found = await self._reap(
            limit=REAP_LIMIT,
            max_losses=RETRY_BUDGET,
            min_left_ms=min_left_ms,
            lease_ms=self._lease_ms,
            keep_ms=BATCH_KEEP_MS,
            pass_ms=pass_ms,
            standing_in=int(standing_in),
        )
        return Reaped(*found)


class DeadLetterList:
    """The list of dead letters of one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove ids. Raises RedisUnavailable."""
        for at in range(0, len(ids), IDS_A_CALL):
            async with bounded(self._client):
                pipeline = self._client.pipeline(transaction=False)
                for request_id in ids[at : at + IDS_A_CALL]:
                    pipeline.lrem(self._keys.dlq, 0, request_id)
                await pipeline.execute()
