"""Replies, increments of streams, and the states of requests.

The stored reply is the truth; messages are the fast way to it. Increments share the gateway's channel with replies,
told apart by the first byte. Nothing waits for them and nothing is kept: each says where in the output its text
belongs, so that a lost, late or doubled one is noticed, and the stored reply has all of it. The lookup of states is for
jobs, which no connection waits for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
import structlog
from redis.asyncio import Redis

from scheduler.redis_client.connections import FAULTS, bounded, line_of, unavailable
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


LOOK_SIZE = 512
REPLIES_SIZE = 32
"""A call: outputs may be large, and an answer too large for the call's time would never be had."""


class RequestStatus(NamedTuple):
    """What Redis knows of one request; an empty `state` is that it knows nothing of it."""

    state: str
    error_code: str = ""
    reply: Reply | None = None

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state in (State.COMPLETED, State.FAILED)


class RequestStatuses:
    """Looks on one pool. Raises RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def epoch(self) -> bytes:
        """What tells this Redis from one that came back empty; b"" where nobody has used it yet."""
        async with bounded():
            return cast("bytes | None", await self._client.get(self._keys.epoch)) or b""

    async def fetch(self, ids: Sequence[str]) -> list[RequestStatus]:
        """Each request's, in order."""
        found: list[RequestStatus] = []
        for start in range(0, len(ids), LOOK_SIZE):
            found += await self._look(ids[start : start + LOOK_SIZE])
        ended = [at for at, stand in enumerate(found) if stand.ended]
        for start in range(0, len(ended), REPLIES_SIZE):
            some = ended[start : start + REPLIES_SIZE]
            stored = await self._pipelined([(self._keys.request(ids[at]), "reply") for at in some])
            for at, (reply,) in zip(some, stored, strict=True):
                found[at] = found[at]._replace(reply=readable(reply))
        return found

    async def _look(self, ids: Sequence[str]) -> list[RequestStatus]:
        rows = await self._pipelined([(self._keys.request(request_id), "state", "code") for request_id in ids])
        return [RequestStatus((state or b"").decode(), (code or b"").decode()) for state, code in rows]

    async def _pipelined(self, asked: Sequence[tuple[str, ...]]) -> list[Any]:
        async with bounded():
            pipeline = self._client.pipeline(transaction=False)
            for key, *fields in asked:
                pipeline.hmget(key, fields)
            return await pipeline.execute()


MARK = b"+"
"""Before the msgpack array. No list of replies begins with it: to msgpack it is a number."""

LOST = -1
"""In the place of an offset: the run that wrote what came before is lost, and with it what it would have written."""


class Increment(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A piece of one output. A gateway takes it only where id and nonce are those of a request that waits there.

    `attempt` counts runs from 1; `offset` is where `text` begins, in characters of the output.
    """

    id: str
    nonce: str
    attempt: int
    offset: int
    text: str


class IncrementTarget(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where the increments of one request go, and by which nonce they are known there."""

    gateway_id: str
    nonce: str

    def written(self) -> str:
        """As `Payload.stream` carries it."""
        return f"{self.gateway_id} {self.nonce}"


def read_address(text: str) -> IncrementTarget | None:
    """What `written` wrote; None for anything else."""
    gateway_id, space, nonce = text.partition(" ")
    return IncrementTarget(gateway_id, nonce) if gateway_id and space and nonce else None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Increment])


def encode_increments(increments: Sequence[Increment]) -> bytes:
    """One message."""
    return MARK + _encode(increments)


def decode_increments(message: bytes) -> list[Increment]:
    """What follows the mark. Raises ValueError."""
    try:
        return _decoder.decode(memoryview(message)[1:])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a list of increments: {error}") from error


class IncrementChannel:
    """Publishes on the channels of gateways."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._line = line_of(client)
        self._keys = keys

    async def publish(self, gateway_id: str, increments: Sequence[Increment]) -> None:
        """One message. Raises RedisUnavailable; then nobody knows whether it arrived, and nobody has to."""
        message = (b"PUBLISH", self._keys.responses(gateway_id), encode_increments(increments))
        try:
            await self._line.call(message)
        except FAULTS as error:
            raise unavailable(error) from error
