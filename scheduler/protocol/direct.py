"""The wire of direct mode: what gateways and workers say to each other past Redis, while Redis is away.

    gateway -> worker    Hello once, then DirectBatch, one at a time
    worker -> gateway    Welcome once, then for each batch DirectResults, or DirectBusy where it is not taken

Messages are msgpack behind a four-byte length, schemas are closed and sizes capped. A connection whose Hello is wrong
is closed without a word. Values and codec only: no I/O.
"""

import hmac
import struct

import msgspec

from scheduler.errors import TierlaneError
from scheduler.protocol.batches import Outcome

HEADER = struct.Struct(">I")
MAX_BODY_BYTES = 32 << 20
MAX_ITEMS = 100


_PURPOSE = b"tierlane direct 1"


def direct_token(service_token: str) -> str:
    """The token of direct calls that follows from the service token; the way back is not known.

    Workers hold this one alone, since they run code of others beside it. As HMAC-SHA256 (RFC 2104), in hexadecimal digits:
    `printf 'tierlane direct 1' | openssl dgst -sha256 -hmac "$SERVICE_TOKEN" -r | cut -d ' ' -f 1` prints the same.
    """
    return hmac.digest(service_token.encode(), _PURPOSE, "sha256").hex() if service_token else ""


class DirectError(TierlaneError):
    """A direct call did not go as the protocol says; the connection is of no more use, and what became of it unknown."""


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """Who calls, and the token that lets it: that of direct calls; gateways of an older version send the service token."""

    gateway_id: str
    token: str


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    """The worker takes calls; no batch may be larger than `max_batch`."""

    worker_id: str
    max_batch: int


class DirectItem(msgspec.Struct, array_like=True, frozen=True):
    """One request: what is left of its deadline in ms, and its encoded payload (scheduler.payload)."""

    id: str
    ms_left: int
    body: bytes


class DirectBatch(msgspec.Struct, array_like=True, frozen=True, tag="batch"):
    """Run these now; at most MAX_ITEMS."""

    seq: int
    items: list[DirectItem]


class DirectResults(msgspec.Struct, array_like=True, frozen=True, tag="results"):
    """The batch `seq` ran: one outcome for each item, in any order."""

    seq: int
    outcomes: list[Outcome]


class DirectBusy(msgspec.Struct, array_like=True, frozen=True, tag="busy"):
    """The batch `seq` was not run, and why in one sentence; another worker may take it."""

    seq: int
    reason: str


ToWorker = Hello | DirectBatch
ToGateway = Welcome | DirectResults | DirectBusy

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)


def pack(message: ToWorker | ToGateway) -> bytes:
    """A whole frame. Raises DirectError for one over the size limit."""
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise DirectError(f"A direct message of {len(body)} bytes is over the limit of {MAX_BODY_BYTES}.")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """The length of the body that follows. Raises DirectError for one over the limit."""
    (length,) = HEADER.unpack(header)
    if length > MAX_BODY_BYTES:
        raise DirectError(f"A direct message announces {length} bytes, over the limit of {MAX_BODY_BYTES}.")
    return int(length)


def read_by_worker(body: bytes) -> ToWorker:
    """Decode what a gateway sent. Raises DirectError."""
    try:
        return _to_worker.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DirectError(f"A direct message cannot be read: {type(error).__name__}.") from None


def read_by_gateway(body: bytes) -> ToGateway:
    """Decode what a worker sent. Raises DirectError."""
    try:
        return _to_gateway.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DirectError(f"A direct message cannot be read: {type(error).__name__}.") from None
