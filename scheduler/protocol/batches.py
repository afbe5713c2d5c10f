"""Scripts for batches: form, claim, renew, finish, fail, release; and what they send and return."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from scheduler.errors import ErrorCode
from scheduler.failpoints import failpoint
from scheduler.protocol.followers import Followers
from scheduler.protocol.pool_view import Queues
from scheduler.protocol.stop_signals import STOPS_MS, StopSignal
from scheduler.protocol.wake_condition import WakeCondition
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import MAX_CALL_BYTES, Script

RETRY_BUDGET = 2
"""Losses of workers that a request may survive; the third ends it and makes it a dead letter."""

GATEWAY_GONE_MS = 2000
"""A gateway without heartbeats for this time is lost: its queued requests end before they reach a GPU."""

BATCH_KEEP_MS = 60_000
"""The lifetime of a batch's keys after its last renewal, in case no process ends it."""

HANDED_BACK, WITHDRAWN = "-", "-withdrawn"
"""Codes of an `Outcome` in `finish_part`: the request returns to the head of its queue, without an attempt; WITHDRAWN only once."""

_HEAD = 7  # Fields of an outcome that the script reads.
_encode = msgspec.msgpack.Encoder().encode
_queues = msgspec.msgpack.Decoder(Queues)
_formed = msgspec.msgpack.Decoder(tuple[int, int, Queues])


class ClaimedRequest(NamedTuple):
    """A request of a claimed batch: remaining time until its deadline, number of the attempt, encoded payload.

    With slots also the name of its queue, and whether it was withdrawn before.
    """

    id: str
    ms_left: int
    attempt: int
    body: bytes
    queue: str = ""
    was_withdrawn: bool = False


class ClaimedBatch(NamedTuple):
    """A batch that this worker owns by `token`. Without requests it is already closed."""

    batch_id: str
    token: str
    requests: Sequence[ClaimedRequest]


class Outcome(NamedTuple):
    """The result of one request. With an error code, `output` is a sentence for the client, or empty.

    `tokens_used`: input and output tokens; `output_tokens`: output tokens; `finish_reason`: `stop` or `length`; `cost_ms`: its
    share of `gpu_ms`, which is the time of the whole batch.
    """

    id: str
    error_code: str
    gpu_ms: float
    tokens_used: int
    model_version: str
    output: str
    output_tokens: int = 0
    finish_reason: str = "stop"
    cost_ms: float = 0.0


class OwnedBatch(NamedTuple):
    """A running batch, the token by which its worker owns it, and the number of its requests that have not ended there."""

    id: str
    token: str
    known: int = 0


class FreeSlots(NamedTuple):
    """The slots of a worker, and how many are free; None while one of its claims is in progress: then only a change is known."""

    free: int | None
    slots: int


def lost(cause: ErrorCode) -> str:
    """The code of an `Outcome` in `finish_part` whose run was lost: the request is retried, or ends with this code."""
    return f"!{cause}"


class MemberEnd(NamedTuple):
    """The outcome of one request of a batch of a worker with slots."""

    batch: OwnedBatch
    outcome: Outcome


class Formed(NamedTuple):
    """The result of `form_batch`: size of the batch (0: none), ids that ended or are damaged, and the queues afterwards."""

    size: int
    dropped: int
    queues: Queues


_claimed = msgspec.msgpack.Decoder(tuple[int, list[ClaimedRequest]])


def _look(
    packed_tiers: bytes,
    dispatcher_id: str | None = None,
    depth: str | None = None,
    ready: str | None = None,
    hold_ms: int | None = None,
) -> None: ...
def _form_batch(
    *,
    batch_id: str,
    packed_picks: bytes,
    lookahead: int,
    lease_ms: int,
    packed_tiers: bytes,
    keep_ms: int,
    gone_ms: int,
    max_tokens: int,
    aged_ms: float,
    fewest: int,
    pace_ms: int,
    kept_free: int,
) -> None: ...
def _claim(
    *,
    batch_id: str,
    worker_id: str,
    token: str,
    lease_ms: int,
    gone_ms: int,
    max_bytes: int,
    slot_count: int | None,
    free: int | None,
) -> None: ...
def _bodies(packed_ids: bytes, max_bytes: int) -> None: ...
def _renew(packed_batches: bytes, lease_ms: int, keep_ms: int) -> None: ...
def _finish(*, batch_id: str, token: str, packed_outcomes: bytes, tails: bytes, more_follow: int) -> None: ...
def _finish_part(
    *,
    worker_id: str,
    packed_batches: bytes,
    packed_outcomes: bytes,
    tails: bytes,
    max_losses: int,
    min_left_ms: int,
    lease_ms: int,
    keep_ms: int,
    slot_count: int,
    free: int | None,
) -> None: ...
def _fail(
    *, batch_id: str, token: str, cause: str, max_losses: int, min_left_ms: int, lease_ms: int, keep_ms: int
) -> None: ...
def _release(batch_id: str, token: str, lease_ms: int, keep_ms: int) -> None: ...
def _push_back(batch_id: str) -> None: ...
def _withdraw(worker_id: str, packed_signal: bytes, keep_ms: int) -> None: ...


class Batches:
    """The scripts for batches of one pool. All methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, *, lease_ms: int) -> None:
        self._lease_ms = lease_ms
        self._look = Script("look", _look, client, keys)
        self._form = Script("form_batch", _form_batch, client, keys)
        self._claim = Script("claim", _claim, client, keys)
        self._bodies = Script("bodies", _bodies, client, keys)
        self._renew = Script("renew", _renew, client, keys)
        self._finish = Script("finish", _finish, client, keys)
        self._finish_part = Script("finish_part", _finish_part, client, keys)
        self._fail = Script("fail", _fail, client, keys)
        self._release = Script("release", _release, client, keys)
        self._push_back = Script("push_back", _push_back, client, keys)
        self._withdraw = Script("withdraw", _withdraw, client, keys)
        self._followers = Followers(client, keys)

    async def look(
        self, tiers: Sequence[str], sleeper: str = "", condition: WakeCondition | None = None, hold_ms: int = 0
    ) -> Queues:
        """Read the queues of these tiers, and the numbers of batches.

        With `condition`, the dispatcher `sleeper` is woken on that condition for `hold_ms`. Requests in the returned queues do not
        wake it any more. Each dispatcher has its own condition.
        """
        if condition is None:
            return _queues.decode(await self._look(_encode(tiers)))
        return _queues.decode(
            await self._look(_encode(tiers), sleeper, str(condition.depth), str(condition.ready), hold_ms)
        )

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
        pace_ms: int = -1,
        kept_free: int = 0,
    ) -> Formed:
        """Move up to `picks` ids per tier into one ready batch, unless `lookahead` batches are ready already.

        With `max_tokens`, requests of similar length are grouped, no batch exceeds it, and requests that have waited for
        `aged_ms` are not skipped because of their length. With `fewest` or `pace_ms`, either all queued requests leave or none:
        they leave if there are at least `fewest`, or one and no batch was formed for `pace_ms`, at most as many as the first
        pick, and a worker is idle. With slots they leave if a worker has enough free ones; `kept_free` slots of the pool stay free.
        """
        packed = await self._form(
            batch_id=batch_id,
            packed_picks=_encode(picks),
            lookahead=lookahead,
            lease_ms=self._lease_ms,
            packed_tiers=_encode(tiers),
            keep_ms=BATCH_KEEP_MS,
            gone_ms=GATEWAY_GONE_MS,
            max_tokens=max_tokens,
            aged_ms=aged_ms,
            fewest=fewest,
            pace_ms=pace_ms,
            kept_free=kept_free,
        )
        return Formed(*_formed.decode(packed))

    async def claim(
        self, batch_id: str, worker_id: str, token: str, slots: FreeSlots | None = None
    ) -> ClaimedBatch | None:
        """Claim a ready batch; None if it is claimed or gone. Large bodies are read in several calls.

        `slots`: those of the worker before this claim, if it has slots.
        """
        packed = await self._claim(
            batch_id=batch_id,
            worker_id=worker_id,
            token=token,
            lease_ms=self._lease_ms,
            gone_ms=GATEWAY_GONE_MS,
            max_bytes=MAX_CALL_BYTES,
            slot_count=slots and slots.slots,
            free=slots and (slots.free or 0),
        )
        if packed is None:
            return None
        absent, members = _claimed.decode(packed)
        if absent:
            without_body = members[-absent:]
            bodies: list[bytes] = []
            while len(bodies) < absent:
                missing = [member.id for member in without_body[len(bodies) :]]
                bodies += await self._bodies(_encode(missing), MAX_CALL_BYTES)
                if not await self.renew(batch_id, token):  # Each call may be slow.
                    return None
            # A request without a body has ended meanwhile.
            members[-absent:] = [
                member._replace(body=body) for member, body in zip(without_body, bodies, strict=False) if body
            ]
        return ClaimedBatch(batch_id, token, members)

    async def renew(self, batch_id: str, token: str, known: int = 0) -> bool | frozenset[str]:
        """Renew the lease. Returns False if the batch is lost; then its work must be dropped.

        With `known` members: returns the ids of the remaining ones if there are fewer by now. The others have ended.
        """
        return (await self.renew_all([OwnedBatch(batch_id, token, known)]))[0]

    async def renew_all(self, batches: Sequence[OwnedBatch]) -> list[bool | frozenset[str]]:
        """Renew several leases in one call; the results are those of `renew`."""
        found = await self._renew(_encode(batches), self._lease_ms, BATCH_KEEP_MS)
        return [frozenset(id_.decode() for id_ in each) if isinstance(each, list) else bool(each) for each in found]

    async def finish(self, batch_id: str, token: str, outcomes: Sequence[Outcome]) -> int:
        """End the requests of a batch and close it. Returns the number of outcomes that were too late (stale).

        Large outputs are sent in several calls, the last of which closes the batch. If they are sent again, the earlier ones
        are stale.
        """
        heads, tails = _split_outcomes(outcomes)
        stale, followers_left = 0, 0
        for start, end in _pieces(tails):
            stale_here, remaining = await self._finish(
                batch_id=batch_id,
                token=token,
                packed_outcomes=_encode(heads[start * _HEAD : end * _HEAD]),
                tails=b"".join(tails[start:end]),
                more_follow=int(end < len(tails)),
            )
            stale, followers_left = stale + stale_here, followers_left + remaining
        await self._end_followers(followers_left)
        return int(stale)

    async def _end_followers(self, are_left: int) -> None:
        if are_left:
            failpoint("followers_unnotified")
            await self._followers.share_all()

    async def finish_part(
        self, worker_id: str, ends: Sequence[MemberEnd], slots: FreeSlots, min_left_ms: int = 0
    ) -> int:
        """End requests of several running batches, each by itself; a batch is closed with its last one. Returns the number of
        outcomes that were too late (stale).

        Requests whose runs were lost are retried if they have at least `min_left_ms` left. Large outputs are sent in several calls.
        """
        heads, tails = _split_outcomes([end.outcome for end in ends])
        numbers: dict[OwnedBatch, int] = {}
        for at, end in enumerate(ends):
            heads.insert(at * (_HEAD + 1), numbers.setdefault(end.batch, len(numbers) + 1))
        owned = _encode([batch[:2] for batch in numbers])
        stale, followers_left = 0, 0
        for start, stop in _pieces(tails):
            free = None if slots.free is None else slots.free - (len(tails) - stop)
            stale_here, remaining = await self._finish_part(
                worker_id=worker_id,
                packed_batches=owned,
                packed_outcomes=_encode(heads[start * (_HEAD + 1) : stop * (_HEAD + 1)]),
                tails=b"".join(tails[start:stop]),
                max_losses=RETRY_BUDGET,
                min_left_ms=min_left_ms,
                lease_ms=self._lease_ms,
                keep_ms=BATCH_KEEP_MS,
                slot_count=slots.slots,
                free=free,
            )
            stale, followers_left = stale + stale_here, followers_left + remaining
        await self._end_followers(followers_left)
        return int(stale)

    async def fail(self, batch_id: str, token: str, cause: ErrorCode, min_left_ms: int) -> bool:
        """The model process was lost with this batch. Returns False if this worker does not own it.

        Requests with retry budget and time left are retried in smaller batches, so that a bad one fails alone.
        """
        kept = await self._fail(
            batch_id=batch_id,
            token=token,
            cause=cause,
            max_losses=RETRY_BUDGET,
            min_left_ms=min_left_ms,
            lease_ms=self._lease_ms,
            keep_ms=BATCH_KEEP_MS,
        )
        return bool(kept >= 0)

    async def release(self, batch_id: str, token: str) -> bool:
        """Return a claimed batch on a graceful stop, without counting an attempt. Returns False if this worker does not own it."""
        return bool(await self._release(batch_id, token, self._lease_ms, BATCH_KEEP_MS) >= 0)

    async def withdraw(self, worker_id: str, count: int, queues: Sequence[str]) -> None:
        """Ask a worker with slots to return `count` runs that have sent nothing, of the first of these queues that has some."""
        await self._withdraw(worker_id, _encode(StopSignal([], count, list(queues))), STOPS_MS)

    async def push_back(self, batch_id: str) -> None:
        """Return a popped batch that will not be claimed to the head of `batch_queue`."""
        await self._push_back(batch_id)


def _pieces(tails: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """The start and end of each call's outcomes; one call if there are none."""
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


def _split_outcomes(outcomes: Sequence[Outcome]) -> tuple[list[str | float], list[bytes]]:
    """The fields that the script reads, and the last eight fields of each reply.

    The latter are packed here, so that Lua only copies bytes; [1:] removes the array header.
    """
    heads: list[str | float] = []
    tails: list[bytes] = []
    rounded: dict[float, float] = {}  # `round` takes as long as the rest, and most numbers of a batch are equal.
    for request_id, code, gpu_ms, tokens, version, output, output_tokens, finish_reason, cost_ms in outcomes:
        if gpu_ms not in rounded:
            rounded[gpu_ms] = round(float(gpu_ms), 3)
        if cost_ms not in rounded:
            rounded[cost_ms] = round(float(cost_ms), 3)
        gpu_ms, cost_ms = rounded[gpu_ms], rounded[cost_ms]
        tail = _encode((gpu_ms, tokens, version, output, output_tokens, finish_reason, "", cost_ms))[1:]
        size = 0 if code else len(output) if output.isascii() else len(output.encode())
        tails.append(tail)
        heads += (request_id, code, gpu_ms, tokens, size, len(tail), cost_ms)
    return heads, tails
