"""An independent reader of rows in the binary format of COPY, written from PostgreSQL's documentation."""

import struct
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
READERS: dict[str, Callable[[bytes], Any]] = {
    "Text": bytes.decode,
    "Uuid": lambda value: str(UUID(bytes=value)),
    "SmallInteger": lambda value: struct.unpack(">h", value)[0],
    "Integer": lambda value: struct.unpack(">i", value)[0],
    "Double": lambda value: struct.unpack(">d", value)[0],
    "Boolean": lambda value: {b"\x00": False, b"\x01": True}[value],
    "DateTime": lambda value: EPOCH + timedelta(microseconds=struct.unpack(">q", value)[0]),
}


def read_row(row: bytes, columns: Sequence[str], types: dict[str, str]) -> dict[str, Any]:
    """The row's values by column; `types` are SQLAlchemy's names of the columns' types. No byte may remain."""
    (count,) = struct.unpack_from(">h", row)
    assert count == len(columns)
    values, at = {}, 2
    for name in columns:
        (length,) = struct.unpack_from(">i", row, at)
        at += 4
        values[name] = None if length < 0 else READERS[types[name]](row[at : at + length])
        at += max(length, 0)
    assert at == len(row)
    return values
