"""Replies: the stored result is the truth, the message on the gateway's channel is the fast way to it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.states import State


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """How one request ended. The gateway answers only where id, customer and nonce are those of the waiting request."""

    id: str
    customer_id: str
    nonce: str
    state: str
    error_code: str  # "" for a completed request
    attempts: int
    queue_ms: float  # -1: it never left its tier queue
    batch_id: str
    batch_size: int
    worker_id: str
    gpu_ms: float  # -1: it never ran to an end
    tokens_used: int
    model_version: str
    output: str  # with an error code: a sentence for the client, or ""
    output_tokens: int = 0
    finish_reason: str = "stop"  # or length
    served_from: str = ""  # `cache`: an answer that was kept; `collapsed`: the run of an equal request; "": its own run


class RequestDetail(msgspec.Struct, frozen=True):
    """What Redis still knows of a request; times are Redis TIME in ms, None where it did not happen yet."""

    state: str
    tier: str
    customer_id: str
    error_code: str
    attempts: int
    accepted_ms: int
    formed_ms: int | None
    ended_ms: int | None


RIDING = b"riding"
"""A row's state while its request waits for the run of an equal one. To others it is queued: it is in no batch."""

log = structlog.get_logger("scheduler")

_DETAIL = ("state", "batch", "env", "who", "code", "ended", "reply")
_one = msgspec.msgpack.Decoder(Reply)
_many = msgspec.msgpack.Decoder(list[Reply])


def decode_reply(stored: bytes) -> Reply:
    """Raises ValueError."""
    try:
        return _one.decode(stored)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a reply: {error}") from error


def readable(stored: bytes | None) -> Reply | None:
    """The stored reply, or None where there is none that can be read: one bad reply must not cost its neighbours."""
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
    """Reads what is stored."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def fetch(self, ids: Sequence[str]) -> list[Reply | None]:
        """The stored reply of each id; None where it has not ended, or is not known. Raises RedisUnavailable."""
        if not ids:
            return []
        async with bounded():
            pipeline = self._client.pipeline(transaction=False)
            for request_id in ids:
                pipeline.hget(self._keys.request(request_id), "reply")
            stored = await pipeline.execute()
        return [readable(reply) for reply in stored]

    async def request_detail(self, request_id: str) -> RequestDetail | None:
        """Where a request stands, or None where Redis does not (or no longer) know it. Raises RedisUnavailable."""
        async with bounded():
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
        _, customer, tier, *_ = who.decode().split(" ")
        return RequestDetail(
            state=State.QUEUED if state == RIDING else state.decode(),
            tier=tier,
            customer_id=customer,
            error_code=(code or b"").decode(),
            attempts=attempts,
            accepted_ms=accepted_ms,
            formed_ms=formed_ms,
            ended_ms=int(ended) if ended else None,
        )
