"""Files of /v1/files in PostgreSQL: upload in chunks, find, list, read, delete.

Each function is one statement, and raises what asyncpg raises. The content of a result file is the lines of its batch.
"""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from ledger.postgres import Connection, statement

PAGE_LINES = 256
PURGED_FILES, PURGED_CHUNKS, PURGED_LINES = 16, 64, 2000
"""Per call: a chunk has half a megabyte."""


class FileRow(msgspec.Struct, frozen=True, gc=False):
    """A complete file. `batch_id`: the batch whose lines, of errors or of responses, are its content; None for an upload."""

    id: str
    customer_id: str
    created_at: datetime
    expires_at: datetime
    purpose: str
    filename: str
    bytes: int
    batch_id: str | None
    of_errors: bool


async def insert_file(connection: Connection, file_id: str, customer_id: str) -> None:
    """Insert an empty file that is not complete. If its upload does not end within an hour, it is deleted."""
    await connection.execute(statement("insert_file"), file_id, customer_id, "")


async def add_chunk(connection: Connection, file_id: str, number: int, data: bytes, max_stored: int) -> bool:
    """Store a chunk. Returns False if its customer then stores more than `max_stored` bytes."""
    return bool(await connection.fetchval(statement("add_chunk"), file_id, number, data, max_stored))


async def complete_file(connection: Connection, file_id: str, filename: str, kept_s: float) -> FileRow | None:
    """The upload has ended. Returns None if the file was deleted."""
    row = await connection.fetchrow(statement("complete_file"), file_id, filename, kept_s)
    return FileRow(*row) if row else None


async def drop_file(connection: Connection, file_id: str) -> None:
    """Let a file whose upload failed expire."""
    await connection.execute(statement("drop_file"), file_id)


async def find_file(connection: Connection, file_id: str, customer_id: str) -> FileRow | None:
    """The customer's complete file."""
    row = await connection.fetchrow(statement("find_file"), file_id, customer_id)
    return FileRow(*row) if row else None


async def list_files(
    connection: Connection, customer_id: str, *, after: str, oldest_first: bool, purpose: str, limit: int
) -> list[FileRow]:
    """A page of the customer's files, from behind the file `after` ("": from the first)."""
    rows = await connection.fetch(statement("list_files"), customer_id, after, oldest_first, purpose, limit)
    return [FileRow(*row) for row in rows]


async def delete_file(connection: Connection, file_id: str, customer_id: str) -> str | None:
    """Delete the customer's file, unless an open batch reads it: returns the id of that batch."""
    found: str | None = await connection.fetchval(statement("delete_file"), file_id, customer_id)
    return found


async def read_chunk(connection: Connection, file_id: str, number: int) -> bytes | None:
    """A chunk of an uploaded file; None after the last one."""
    found: bytes | None = await connection.fetchval(statement("read_chunk"), file_id, number)
    return found


async def read_output(
    connection: Connection, batch_id: str, after: int, max_bytes: int, *, of_errors: bool
) -> Sequence[tuple[int, bytes]]:
    """The next lines of a result file, by number: about `max_bytes`; none at the end."""
    rows = await connection.fetch(statement("read_output"), batch_id, of_errors, after, max_bytes, PAGE_LINES)
    return [(row["number"], row["output"]) for row in rows]


async def purge_files(connection: Connection) -> None:
    """Delete expired files, in parts."""
    await connection.execute(statement("purge_files"), PURGED_FILES, PURGED_CHUNKS, PURGED_LINES)
