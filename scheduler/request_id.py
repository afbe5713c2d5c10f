"""Request ids: `req_` + UUIDv7 hex. An id contains its creation time, which is the audit's partition key."""

from datetime import UTC, datetime

from uuid_utils import uuid7

PREFIX = "req_"
_LENGTH = len(PREFIX) + 32
_TIME = slice(len(PREFIX), len(PREFIX) + 12)


def new_request_id() -> str:
    """A new id. Ids of one process sort in the order of their creation."""
    return PREFIX + uuid7().hex


def own_created_ms(request_id: str) -> int:
    """As `created_ms`, of an id that this process created: without a check."""
    return int(request_id[_TIME], 16)


def created_ms(request_id: str) -> int:
    """The creation time of an id, in milliseconds since the epoch (its first 48 bits; RFC 9562, section 5.7).

    Raises ValueError for a text that is not a request id.
    """
    if len(request_id) != _LENGTH or not request_id.startswith(PREFIX):
        raise ValueError(f"{request_id!r} is not a request id")
    bits = int(request_id[len(PREFIX) :], 16)
    if (bits >> 76) & 0xF != 7:
        raise ValueError(f"{request_id!r} is not made from a UUIDv7")
    return bits >> 80


def created_at(request_id: str) -> datetime:
    """The id's creation time, in UTC with millisecond precision."""
    return datetime.fromtimestamp(created_ms(request_id) / 1000, tz=UTC)
