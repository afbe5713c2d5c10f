"""COPY's binary format: fields of a row as bytes, as PostgreSQL reads them with the least work on both sides.

A field is its length and its value, big-endian; NULL is the length -1. A row begins with the number of its fields.
"""

from collections.abc import AsyncIterator, Iterable
from math import inf
from struct import Struct

NULL = b"\xff\xff\xff\xff"
_BEGIN = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
_END = b"\xff\xff"
EPOCH_MS = 946_684_800_000  # PostgreSQL counts microseconds from the year 2000.
MOST_MS = 253_402_300_799_999  # The end of the year 9999: what is later could be written, but not read again.

_LENGTH = Struct(">i")
_SMALLINT = Struct(">ih")
_INTEGER = Struct(">ii")
_BIGINT = Struct(">iq")
_DOUBLE = Struct(">id")


def text(value: str) -> bytes:
    """A text; an empty one is NULL."""
    if not value:
        return NULL
    encoded = value.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def raw(value: bytes) -> bytes:
    """The bytes of any type."""
    return _LENGTH.pack(len(value)) + value


def smallint(value: int) -> bytes:
    """Raises struct.error for one that is too large."""
    return _SMALLINT.pack(2, value)


def integer(value: int) -> bytes:
    """Raises struct.error for one that is too large."""
    return _INTEGER.pack(4, value)


def boolean(value: bool) -> bytes:  # noqa: FBT001 - it is a field like the others
    return raw(b"\x01" if value else b"\x00")


def double(value: float) -> bytes:
    """NULL for less than 0, for infinity and for NaN."""
    return _DOUBLE.pack(8, value) if 0 <= value < inf else NULL


def timestamptz(epoch_ms: int) -> bytes:
    """A time; NULL for 0 and less, which stand for "not known". Raises ValueError for one that nobody could read."""
    if epoch_ms > MOST_MS:
        raise ValueError(f"{epoch_ms} is not a time")
    return _BIGINT.pack(8, (epoch_ms - EPOCH_MS) * 1000) if epoch_ms > 0 else NULL


async def stream(rows: Iterable[bytes]) -> AsyncIterator[bytes]:
    """What COPY is sent for these rows."""
    yield b"".join((_BEGIN, *rows, _END))
