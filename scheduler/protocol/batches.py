"""The life of a batch: formed, claimed, renewed, finished, failed or released; and the notification of its followers.

`share` tells requests that follow an equal one that its run has ended, a few in each call. The end of a run tells the
first of them itself, the worker goes on with the others; should it die or lose Redis, the reaper does. Two at once do
no harm: each follower is taken and ended in one script.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from scheduler.batching.policy import WakeCondition
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.failpoints import failpoint
from scheduler.protocol.pool_view import Queues
from scheduler.redis_client.connections import blocking_read, bounded, line_of
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import MAX_CALL_BYTES, Script

MOST_CALLS = 64
"""What one may do in a row: four thousand riders. The rest is the caretaker's, which comes again soon."""


class Followers:
    """The share script on one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("share", client, keys)

    async def share(self) -> bool:
        """Tell a few; whether more are left. Raises RedisUnavailable."""
        return bool(await self._script())

    async def share_all(self) -> None:
        """Tell all, as far as Redis answers and MOST_CALLS allow."""
        try:
            for _ in range(MOST_CALLS):
                if not await self.share():
                    return
        except RedisUnavailable:
            return  # Nothing is lost: `sharing` names whose riders wait.


LEASE_MS = 600
"""A lease; the worker renews it every 150 ms while its model makes progress."""

RETRY_BUDGET = 2
"""Lost workers that one request may survive; the third loss ends it and makes it a dead letter."""

GATEWAY_GONE_MS = 2000
"""A gateway that was silent for so long is dead: its queued work is dropped before the GPU."""

BATCH_KEEP_MS = 60_000
"""How long the keys of a batch outlive its last renewal, should everybody who cares for it be gone."""


class ClaimedRequest(NamedTuple):
    """A member of a claimed batch: what is left of its deadline, which attempt this is, and its encoded payload."""

    id: str
    ms_left: int
    attempt: int
    body: bytes


class ClaimedBatch(NamedTuple):
    """A batch that this worker owns by `token`; without requests it is closed already."""

    batch_id: str
    token: str
    requests: Sequence[ClaimedRequest]


class Outcome(NamedTuple):
    """What the model made of one request. With an error code, `output` is a sentence for the client, or empty.

    `tokens_used` counts those read and written, `output_tokens` the latter; `finish_reason` is `stop` or `length`.
    """

    id: str
    error_code: str
    gpu_ms: float
    tokens_used: int
    model_version: str
    output: str
    output_tokens: int = 0
    finish_reason: str = "stop"


class Formed(NamedTuple):
    """What `form_batch` did: members of the new batch (0: refused or nothing fit), ids ended or damaged, what waits now."""

    size: int
    dropped: int
    queues: Queues


_encode = msgspec.msgpack.Encoder().encode
_queues = msgspec.msgpack.Decoder(Queues)
_formed = msgspec.msgpack.Decoder(tuple[int, int, Queues])
_claimed = msgspec.msgpack.Decoder(tuple[int, list[ClaimedRequest]])


class Batches:
    """Every verb on a batch, on one pool. All raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, *, lease_ms: int = LEASE_MS) -> None:
        self._lease_ms = lease_ms
        self._look = Script("look", client, keys)
        self._form = Script("form_batch", client, keys)
        self._claim = Script("claim", client, keys)
        self._bodies = Script("bodies", client, keys)
        self._renew = Script("renew", client, keys)
        self._finish = Script("finish", client, keys)
        self._fail = Script("fail", client, keys)
        self._release = Script("release", client, keys)
        self._push_back = Script("push_back", client, keys)
        self._followers = Followers(client, keys)

    async def look(
        self, tiers: Sequence[str], sleeper: str = "", wish: WakeCondition | None = None, hold_ms: int = 0
    ) -> Queues:
        """What waits in these tiers, and what runs.

        With a wish, dispatcher `sleeper` is woken for that, for `hold_ms`, from here on: what the reply shows already
        wakes nobody. Each dispatcher has a wish of its own.
        """
        if wish is None:
            return _queues.decode(await self._look(_encode(tiers)))
        return _queues.decode(await self._look(_encode(tiers), sleeper, wish.depth, wish.ready, hold_ms))

    async def form(
        self,
        batch_id: str,
        picks: Sequence[tuple[str, int]],
        lookahead: int,
        tiers: Sequence[str],
        *,
        max_tokens: int = 0,
        aged_ms: float = 1000.0,
        fewest: int = 0,
    ) -> Formed:
        """Move up to `picks` ids a tier into one ready batch, unless `lookahead` batches stand ready already.

        With `max_tokens` those of similar length go together, no batch costs more, and who has waited for `aged_ms` is
        not passed over for its length. With `fewest` it is all or nothing: all that waits leaves, if it is so many, no more
        than the first pick, and a worker is idle.
        """
        packed = await self._form(
            batch_id,
            _encode(picks),
            lookahead,
            self._lease_ms,
            _encode(tiers),
            BATCH_KEEP_MS,
            GATEWAY_GONE_MS,
            max_tokens,
            aged_ms,
            fewest,
        )
        return Formed(*_formed.decode(packed))

    async def claim(self, batch_id: str, worker_id: str, token: str) -> ClaimedBatch | None:
        """Take a ready batch; None where somebody else has it or it is gone. Many large bodies come in several calls."""
        packed = await self._claim(batch_id, worker_id, token, self._lease_ms, GATEWAY_GONE_MS, MAX_CALL_BYTES)
        if packed is None:
            return None
        absent, members = _claimed.decode(packed)
        if absent:
            late = members[-absent:]
            bodies = await self._fetched(batch_id, token, [member.id for member in late])
            if bodies is None:
                return None
            # A request without a body has ended meanwhile.
            members[-absent:] = [member._replace(body=bodies[member.id]) for member in late if bodies[member.id]]
        return ClaimedBatch(batch_id, token, members)

    async def _fetched(self, batch_id: str, token: str, ids: Sequence[str]) -> dict[str, bytes] | None:
        """Bodies in as many calls as it takes; None where the batch was lost meanwhile. Calls may be slow, so each renews."""
        found: dict[str, bytes] = {}
        while len(found) < len(ids):
            asked = ids[len(found) :]
            found |= zip(asked, await self._bodies(_encode(asked), MAX_CALL_BYTES), strict=False)
            if not await self.renew(batch_id, token):
                return None
        return found

    async def renew(self, batch_id: str, token: str, known: int = 0) -> bool | frozenset[str]:
        """Move the lease on; False where the batch is lost and its work must be dropped.

        With `known` members: the ids of those that are left, where they are fewer by now. Nobody waits for the others.
        """
        found = await self._renew(batch_id, token, self._lease_ms, BATCH_KEEP_MS, known)
        return frozenset(each.decode() for each in found) if isinstance(found, list) else bool(found)

    async def finish(self, batch_id: str, token: str, outcomes: Sequence[Outcome]) -> int:
        """End the members of a batch and close it; returns how many outcomes came too late (stale).

        Large outputs go in several calls, of which the last closes the batch: sent again, those before are stale.
        """
        heads, tails = _told(outcomes)
        stale, riders_left = 0, 0
        for start, end in _pieces(tails):
            piece = _encode(heads[start * _HEAD : end * _HEAD]), b"".join(tails[start:end])
            late, untold = await self._finish(batch_id, token, *piece, int(end < len(tails)))
            stale, riders_left = stale + late, riders_left + untold
        if riders_left:
            failpoint("riders_untold")
            await self._followers.share_all()
        return int(stale)

    async def fail(self, batch_id: str, token: str, cause: ErrorCode, min_left_ms: int) -> bool:
        """The model process was lost with this batch; False where it is not ours.

        What has budget and time is run again in smaller batches, so that one bad member ends alone.
        """
        kept = await self._fail(batch_id, token, cause, RETRY_BUDGET, min_left_ms, self._lease_ms, BATCH_KEEP_MS)
        return bool(kept >= 0)

    async def release(self, batch_id: str, token: str) -> bool:
        """Hand a claimed batch back on a graceful stop: nothing is counted; False where it is not ours."""
        return bool(await self._release(batch_id, token, self._lease_ms, BATCH_KEEP_MS) >= 0)

    async def push_back(self, batch_id: str) -> None:
        """Return a batch that was popped and will not be claimed to the head of the line."""
        await self._push_back(batch_id)


def _pieces(tails: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Where each call's outcomes begin and end; one call where there are none."""
    if sum(map(len, tails)) <= MAX_CALL_BYTES:
        yield 0, len(tails)
        return
    start, size = 0, 0
    for at, tail in enumerate(tails):
        if at > start and size + len(tail) > MAX_CALL_BYTES:
            yield start, at
            start, size = at, 0
        size += len(tail)
    yield start, len(tails)


_HEAD = 6  # What the script itself reads of an outcome.


def _told(outcomes: Sequence[Outcome]) -> tuple[list[str | float], list[bytes]]:
    """What the script itself reads of them, and the last six fields of their replies.

    Those are packed here, so that Lua only moves their bytes; [1:] cuts the array header.
    """
    heads: list[str | float] = []
    tails: list[bytes] = []
    for request_id, code, gpu_ms, tokens, version, output, output_tokens, finish_reason in outcomes:
        gpu_ms = round(gpu_ms, 3)
        tail = _encode((gpu_ms, tokens, version, output, output_tokens, finish_reason))[1:]
        size = 0 if code else len(output) if output.isascii() else len(output.encode())
        tails.append(tail)
        heads += (request_id, code, gpu_ms, tokens, size, len(tail))
    return heads, tails


class ReadyBatches:
    """The blocking read of `batch_queue`.

    What it pops is an id only: the batch stands in inflight under a lease, so a pop that is lost with its worker costs
    a lease, never a request.
    """

    def __init__(self, blocking: Redis, keys: Keys, block_s: float = 1.0) -> None:
        self._client = blocking
        self._key = keys.batch_queue
        self._block_s = block_s

    async def pop(self) -> str | None:
        """The next ready batch, or None after `block_s`. Raises RedisUnavailable, at the latest a second after that."""
        found: Any = await blocking_read(self._client, b"BLPOP", self._key, self._block_s, block_s=self._block_s)
        return str(found[1].decode()) if found else None

    async def let_go(self) -> None:
        """Have Redis end a `pop` that waits; it returns what it has, or None. Raises RedisUnavailable."""
        client_id = line_of(self._client).client_id
        if client_id is not None:
            async with bounded():
                await self._client.client_unblock(client_id)

    def hang_up(self) -> None:
        """End a `pop` that waits at a Redis which is away: it raises RedisUnavailable now."""
        line_of(self._client).close()
