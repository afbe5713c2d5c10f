"""COPY's binary format: fields and the stream of rows. Pure functions.

A field is its length and its value, big-endian; NULL has the length -1. A row starts with the number of its fields.
"""

from collections.abc import AsyncIterator, Iterable
from math import inf
from struct import Struct

NULL = b"\xff\xff\xff\xff"
_BEGIN = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
_END = b"\xff\xff"
EPOCH_MS = 946_684_800_000  # The year 2000, from which PostgreSQL counts microseconds.
MAX_MS = 253_402_300_799_999  # The end of the year 9999: Python cannot read a later time.

_LENGTH = Struct(">i")
_SMALLINT = Struct(">ih")
_INTEGER = Struct(">ii")
_BIGINT = Struct(">iq")
_DOUBLE = Struct(">id")


def encode_text(value: str) -> bytes:
    """Empty text is NULL."""
    if not value:
        return NULL
    encoded = value.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def encode_raw(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def encode_smallint(value: int) -> bytes:
    return _SMALLINT.pack(2, value)


def encode_integer(value: int) -> bytes:
    return _INTEGER.pack(4, value)


def encode_double(value: float) -> bytes:
    """Negative numbers, infinity and NaN are NULL."""
    return _DOUBLE.pack(8, value) if 0 <= value < inf else NULL


def encode_timestamptz(epoch_ms: int) -> bytes:
    """0 and negative numbers, which mean "unknown", are NULL. Raises ValueError after the year 9999."""
    if epoch_ms > MAX_MS:
        raise ValueError(f"{epoch_ms} is not a time")
    return _BIGINT.pack(8, (epoch_ms - EPOCH_MS) * 1000) if epoch_ms > 0 else NULL


async def stream(rows: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The data of a COPY of these rows."""
    yield b"".join((_BEGIN, *rows, _END))


def encode_count(value: int) -> bytes:
    """0 means "unknown"."""
    return encode_integer(value) if value else NULL
