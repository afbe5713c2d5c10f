"""Increments: what a running request has written so far, sent to its gateway while the model goes on.

They share the gateway's channel with replies, told apart by the first byte. Nothing waits for them and nothing is kept:
each says where in the output its text belongs, so that one that is lost, late or told twice is noticed, and the stored
reply has all of it.
"""

from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from scheduler.redis_client.connections import FAULTS, line_of, unavailable
from scheduler.redis_client.keys import Keys

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


class Address(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where the increments of one request go, and by which nonce they are known there."""

    gateway_id: str
    nonce: str

    def written(self) -> str:
        """As `Payload.stream` carries it."""
        return f"{self.gateway_id} {self.nonce}"


def read_address(text: str) -> Address | None:
    """What `written` wrote; None for anything else."""
    gateway_id, space, nonce = text.partition(" ")
    return Address(gateway_id, nonce) if gateway_id and space and nonce else None


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
