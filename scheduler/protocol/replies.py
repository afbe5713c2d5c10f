"""Replies, increments of streams, and the states of requests.

The stored reply is authoritative; messages only deliver it faster. Increments are sent on the gateway's channel like
replies, and differ in the first byte. They are not acknowledged or stored: each contains its offset in the output, so that
lost, late and duplicate ones are detected, and the stored reply has the complete output. States are read for jobs, which
have no open connection.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
import structlog
from redis.asyncio import Redis

from scheduler.redis_client.connections import FAULTS, bounded, pipelined, unavailable
from scheduler.redis_client.keys import Keys
from scheduler.states import State, tier_of


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


RIDING = b"riding"
"""The state of a row while its request waits for the run of an equal one. It is reported as queued."""

log = structlog.get_logger("scheduler")

_DETAIL = ("state", "batch", "env", "who", "code", "ended", "reply")
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


STATES_SIZE = 512
REPLIES_SIZE = 32
"""Replies per call: outputs may be large, and the call has a timeout."""


class RequestStatus(NamedTuple):
    """The state of one request; `state` is "" if Redis does not store it."""

    state: str
    error_code: str = ""
    reply: Reply | None = None

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state in (State.COMPLETED, State.FAILED)


class RequestStatuses:
    """Reads states of requests of one pool. Raises RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def epoch(self) -> bytes:
        """The epoch of this Redis, which changes when it loses its data; b"" before its first use."""
        async with bounded(self._client):
            return cast("bytes | None", await self._client.get(self._keys.epoch)) or b""

    async def fetch(self, ids: Sequence[str]) -> list[RequestStatus]:
        """The state of each request, in order."""
        found: list[RequestStatus] = []
        for start in range(0, len(ids), STATES_SIZE):
            found += await self._states(ids[start : start + STATES_SIZE])
        ended = [at for at, status in enumerate(found) if status.ended]
        for start in range(0, len(ended), REPLIES_SIZE):
            some = ended[start : start + REPLIES_SIZE]
            stored = await self._pipelined([(self._keys.request(ids[at]), "reply") for at in some])
            for at, (reply,) in zip(some, stored, strict=True):
                found[at] = found[at]._replace(reply=readable(reply))
        return found

    async def _states(self, ids: Sequence[str]) -> list[RequestStatus]:
        rows = await self._pipelined([(self._keys.request(request_id), "state", "code") for request_id in ids])
        return [RequestStatus((state or b"").decode(), (code or b"").decode()) for state, code in rows]

    async def _pipelined(self, reads: Sequence[tuple[str, ...]]) -> list[Any]:
        async with bounded(self._client):
            pipeline = self._client.pipeline(transaction=False)
            for key, *fields in reads:
                pipeline.hmget(key, fields)
            return await pipeline.execute()


INCREMENTS_MARK = b"+"
"""The first byte of a message with increments. A message with replies cannot start with it."""

LOST = -1
"""The offset of an increment that reports the loss of the run, whose text will not continue."""


class Increment(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A part of one output. A gateway uses it only if id and nonce match a pending request.

    `attempt`: the number of the run, from 1; `offset`: the position of `text` in the output, in characters.
    """

    id: str
    nonce: str
    attempt: int
    offset: int
    text: str


class IncrementTarget(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The gateway that receives the increments of a request, and the nonce of the request."""

    gateway_id: str
    nonce: str

    def written(self) -> str:
        """The text for `Payload.stream`."""
        return f"{self.gateway_id} {self.nonce}"


def read_address(text: str) -> IncrementTarget | None:
    """Parse the text of `written`; None if it is not valid."""
    gateway_id, space, nonce = text.partition(" ")
    return IncrementTarget(gateway_id, nonce) if gateway_id and space and nonce else None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Increment])


def encode_increments(increments: Sequence[Increment]) -> bytes:
    """Encode a message."""
    return INCREMENTS_MARK + _encode(increments)


def decode_increments(message: bytes) -> list[Increment]:
    """Decode a message after its first byte. Raises ValueError."""
    try:
        return _decoder.decode(memoryview(message)[1:])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a list of increments: {error}") from error


class IncrementChannel:
    """Publishes increments to gateways."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._pipelined = pipelined(client)
        self._keys = keys

    async def publish(self, gateway_id: str, increments: Sequence[Increment]) -> bool:
        """Publish one message; whether the gateway was subscribed. Raises RedisUnavailable: it may have been delivered."""
        message = (b"PUBLISH", self._keys.responses(gateway_id), encode_increments(increments))
        try:
            return bool(await self._pipelined.call(message))
        except FAULTS as error:
            raise unavailable(error) from error
