"""Ends that no worker writes: cancelled, expired and reaped requests; and the list of dead letters.

Health counts dead letters by the list in Redis; the dead letters themselves are rows in PostgreSQL. Rows of jobs are
released here once PostgreSQL has their ends.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from scheduler.errors import ErrorCode
from scheduler.protocol.batches import BATCH_KEEP_MS, LEASE_MS, RETRY_BUDGET, Followers
from scheduler.protocol.replies import Reply, readable
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

REAP_LIMIT = 100
"""Batches a call, so that a mass expiry (a clock jump, say) never holds the server."""

EXPIRE_LIMIT = 256
"""Ids a tier and call."""

STORED_KEEP_MS = 30_000
"""Of a job's row whose end is in PostgreSQL: as long as other rows are kept past their deadline."""

_encode = msgspec.msgpack.Encoder().encode


class Cancellation(NamedTuple):
    """An id and the code that it ends with.

    `running`: CANCELLED ends it even while it runs, and its worker then stops. `told`: the client has this code for an
    answer, which decides over whatever end was noted meanwhile. `used`: tokens of its stream that were delivered.
    """

    id: str
    code: ErrorCode
    running: bool = False
    told: bool = False
    used: int = 0


Cancelled = Cancellation | tuple[str, ErrorCode] | tuple[str, ErrorCode, bool]


class Reaped(NamedTuple):
    """What one reaper pass found among the leases that ran out."""

    renewed: int
    pushed_again: int
    retried: int
    unknown: int


class Terminations:
    """cancel, expire and reap on one pool."""

    def __init__(self, client: Redis, keys: Keys, *, lease_ms: int = LEASE_MS) -> None:
        self._cancel = Script("cancel", client, keys)
        self._expire = Script("expire", client, keys)
        self._reap = Script("reap", client, keys)
        self._stored = Script("stored", client, keys)
        self._followers = Followers(client, keys)
        self._lease_ms = lease_ms
        self.damaged = 0  # Rows that no script could read, as `expire` last saw them noted: the newest 1,000.

    async def cancel(self, requests: Sequence[Cancelled]) -> list[Reply | None]:
        """End each request as failed with its code, unless it has ended already.

        Returns the reply that stands, ours or the earlier one; None where it is unknown, or was left running because
        the code is CANCELLED (a running batch is finished and its answer discarded).
        """
        if not requests:
            return []
        stored: list[bytes] = await self._cancel(_encode(requests))
        return [readable(reply) for reply in stored]

    async def stored(self, ids: Sequence[str], keep_ms: int = STORED_KEEP_MS) -> int:
        """The ends of these jobs are in PostgreSQL: Redis keeps their rows for `keep_ms` more, or as long as they answer
        an Idempotency-Key. Returns how many of them have ended in Redis. Raises RedisUnavailable.
        """
        return int(await self._stored(keep_ms, _encode(ids))) if ids else 0

    async def expire(self, tiers: Sequence[str]) -> tuple[int, int]:
        """End what waited longer than its queue age: (ended, dead entries swept). Riders left untold are told on the way."""
        ended, swept, riders_left, self.damaged = await self._expire(_encode(tiers), EXPIRE_LIMIT)
        if riders_left:
            await self._followers.share_all()
        return ended, swept

    async def reap(self, min_left_ms: int, pass_ms: int = 100, *, standing_in: bool = False) -> Reaped:
        """Look after every batch whose lease ran out; members with less time left than `min_left_ms` end.

        `pass_ms` is how often this is done: where it is late by half a lease, running batches get one more lease.
        `standing_in`: a gateway does it because no scheduler does.
        """
        found = await self._reap(
            REAP_LIMIT, RETRY_BUDGET, min_left_ms, self._lease_ms, pass_ms, BATCH_KEEP_MS, int(standing_in)
        )
        return Reaped(*found)


IDS_A_CALL = 20
"""Each costs a walk over a list of up to ten thousand, a quarter of a millisecond in which Redis serves nobody else."""


class DeadLetterList:
    """The list of one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def remove(self, ids: Sequence[str]) -> None:
        """Take these ids out, wherever they stand. Raises RedisUnavailable."""
        for at in range(0, len(ids), IDS_A_CALL):
            async with bounded():
                pipeline = self._client.pipeline(transaction=False)
                for request_id in ids[at : at + IDS_A_CALL]:
                    pipeline.lrem(self._keys.dlq, 0, request_id)
                await pipeline.execute()
