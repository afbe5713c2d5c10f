"""Replies of requests, and what Redis stores of one request.

The stored reply is authoritative; messages only deliver it faster.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import structlog
from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.states import State, tier_of

RIDING = b"riding"
"""The state of a row while its request waits for the run of an equal one. It is reported as queued."""

log = structlog.get_logger("scheduler")

_DETAIL = ("state", "batch", "env", "who", "code", "ended", "reply")


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The result of one request. A gateway uses it only if id, customer and nonce match a pending request."""

    id: str
    customer_id: str
    nonce: str
    state: str
    error_code: str  # "" for a completed request
    attempts: int
    queue_ms: float  # -1: it never left its tier queue.
    batch_id: str
    batch_size: int
    worker_id: str
    gpu_ms: float  # -1: no run of it ended.
    tokens_used: int
    model_version: str
    output: str  # with an error code: a sentence for the client, or ""
    output_tokens: int = 0
    finish_reason: str = "stop"  # or length
    served_from: str = ""  # `cache`: a stored result; `collapsed`: the run of an equal request; "": its own run.
    cost_ms: float = -1.0  # The GPU time that it pays; -1: it is not charged.


class StoredReply(NamedTuple):
    """A reply that Redis stores, and Redis TIME in ms when its request ended; None in a row that does not say it."""

    reply: Reply
    ended_ms: int | None


class RequestDetail(msgspec.Struct, frozen=True):
    """A request that Redis still stores; times are Redis TIME in ms, None if they have not happened yet."""

    state: str
    tier: str
    customer_id: str
    error_code: str
    attempts: int
    accepted_ms: int
    formed_ms: int | None
    ended_ms: int | None
    queue: str = ""  # Of the tier, or its background queue.


_one = msgspec.msgpack.Decoder(Reply)
_many = msgspec.msgpack.Decoder(list[Reply])


def decode_reply(stored: bytes) -> Reply:
    """Decode a stored reply. Raises ValueError."""
    try:
        return _one.decode(stored)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a reply: {error}") from error


def readable(stored: bytes | None) -> Reply | None:
    """The stored reply; None if there is none or it cannot be read, so that others are not affected."""
    try:
        return decode_reply(stored) if stored else None
    except ValueError:
        log.warning("unreadable_reply", size=len(stored or b""))
        return None


def decode_replies(message: bytes) -> list[Reply]:
    """The replies of one pub/sub message. Raises ValueError."""
    try:
        return _many.decode(message)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a list of replies: {error}") from error


class Results:
    """Reads stored replies of one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def fetch(self, ids: Sequence[str]) -> list[Reply | None]:
        """The stored reply of each id; None if the request has not ended or is unknown. Raises RedisUnavailable."""
        if not ids:
            return []
        async with bounded(self._client):
            pipeline = self._client.pipeline(transaction=False)
            for request_id in ids:
                pipeline.hget(self._keys.request(request_id), "reply")
            stored = await pipeline.execute()
        return [readable(reply) for reply in stored]

    async def stored(self, request_id: str) -> StoredReply | None:
        """The stored reply with its end; None as for `fetch`. Raises RedisUnavailable."""
        async with bounded(self._client):
            found: list[Any] = await self._client.hmget(self._keys.request(request_id), ("reply", "ended"))
        stored, ended = found
        reply = readable(stored)
        return StoredReply(reply, int(ended) if ended else None) if reply else None

    async def request_detail(self, request_id: str) -> RequestDetail | None:
        """The state of a request; None if Redis does not store it. Raises RedisUnavailable."""
        async with bounded(self._client):
            found: list[Any] = await self._client.hmget(self._keys.request(request_id), _DETAIL)
            state, batch, env, who, code, ended, stored = found
            if state is None or env is None or who is None:
                return None
            run: list[Any] = [None] * 3
            if state == b"processing" and batch is not None:
                run = await self._client.hmget(self._keys.batch(batch.decode()), ("state", "losses", "at"))
        accepted_ms, reply = int(env[:13]), readable(stored)
        running, losses, formed = run
        attempts, formed_ms = int(losses or 0) + (running == b"running"), int(formed) if formed else None
        if reply:
            attempts = reply.attempts
            formed_ms = accepted_ms + int(reply.queue_ms) if reply.queue_ms >= 0 else None
        _, customer, queue, *_ = who.decode().split(" ")
        tier = tier_of(queue)
        return RequestDetail(
            state=State.QUEUED if state == RIDING else state.decode(),
            tier=tier,
            customer_id=customer,
            error_code=(code or b"").decode(),
            attempts=attempts,
            accepted_ms=accepted_ms,
            formed_ms=formed_ms,
            ended_ms=int(ended) if ended else None,
            queue=queue,
        )
