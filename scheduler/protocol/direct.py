"""The wire format of direct mode, in which gateways call workers while Redis is unavailable.

    gateway -> worker    Hello once, then DirectBatch, one at a time
    worker -> gateway    Welcome once, then for each batch DirectResults, or DirectBusy if it was not run

Messages are msgpack after a four-byte length, with fixed schemas and a size limit. The worker closes a connection with a
wrong Hello without a response. Values and codec only: no I/O.
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

_encoder = msgspec.msgpack.Encoder()


def direct_token(service_token: str) -> str:
    """The token of direct calls, derived from the service token, which cannot be derived from it.

    Workers have only this token, because they also run user code. It is an HMAC-SHA256 (RFC 2104) in hexadecimal digits:
    `printf 'tierlane direct 1' | openssl dgst -sha256 -hmac "${SERVICE_TOKEN:?}" -r | cut -d ' ' -f 1` prints the same.
    """
    return _derived(service_token) if service_token else ""


def is_from_empty_token(token: str) -> bool:
    """Whether this token was derived, as by that command, from an empty service token, so that everybody knows it."""
    return token == _derived("")


def _derived(service_token: str) -> str:
    return hmac.digest(service_token.encode(), _PURPOSE, "sha256").hex()


class DirectError(TierlaneError):
    """A direct call failed: the connection must be closed, and the results of its batch are unknown."""


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """The calling gateway and its token, that of direct calls; older gateways send the service token."""

    gateway_id: str
    token: str


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    """The worker accepts calls. `max_batch`: the largest batch."""

    worker_id: str
    max_batch: int


class DirectItem(msgspec.Struct, array_like=True, frozen=True):
    """One request: milliseconds until its deadline, and its encoded payload (scheduler.payload)."""

    id: str
    ms_left: int
    body: bytes


class DirectBatch(msgspec.Struct, array_like=True, frozen=True, tag="batch"):
    """A batch to run now, of at most MAX_ITEMS."""

    seq: int
    items: list[DirectItem]


class DirectResults(msgspec.Struct, array_like=True, frozen=True, tag="results"):
    """The results of batch `seq`: one outcome for each item, in any order."""

    seq: int
    outcomes: list[Outcome]


class DirectBusy(msgspec.Struct, array_like=True, frozen=True, tag="busy"):
    """Batch `seq` was not run, with the reason in one sentence; it may be sent to another worker."""

    seq: int
    reason: str


ToWorker = Hello | DirectBatch
ToGateway = Welcome | DirectResults | DirectBusy

_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)


def pack(message: ToWorker | ToGateway) -> bytes:
    """Encode a frame. Raises DirectError if it exceeds the size limit."""
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise DirectError(f"A direct message of {len(body)} bytes is over the limit of {MAX_BODY_BYTES}.")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """The length of the body. Raises DirectError if it exceeds the size limit."""
    (length,) = HEADER.unpack(header)
    if length > MAX_BODY_BYTES:
        raise DirectError(f"A direct message announces {length} bytes, over the limit of {MAX_BODY_BYTES}.")
    return int(length)


def read_by_worker(body: bytes) -> ToWorker:
    """Decode a message of a gateway. Raises DirectError."""
    try:
        return _to_worker.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DirectError(f"A direct message cannot be read: {type(error).__name__}.") from None


def read_by_gateway(body: bytes) -> ToGateway:
    """Decode a message of a worker. Raises DirectError."""
    try:
        return _to_gateway.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DirectError(f"A direct message cannot be read: {type(error).__name__}.") from None
