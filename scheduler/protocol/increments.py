"""Increments of streams, sent on the gateway's channel like replies; they differ in the first byte.

They are not acknowledged or stored: each contains its offset in the output, so that lost, late and duplicate ones are
detected, and the stored reply has the complete output.
"""

from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from scheduler.redis_client.connections import FAULTS, pipelined, unavailable
from scheduler.redis_client.keys import Keys

INCREMENTS_MARK = b"+"
"""The first byte of a message with increments. A message with replies cannot start with it."""

LOST = -1
"""The offset of an increment that reports the loss of the run, whose text will not continue."""

_encode = msgspec.msgpack.Encoder().encode


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
