"""Audit rows and dead letters into PostgreSQL, some at a time, each time in one transaction.

Rows that should be new go by COPY straight into `requests`, which is lost whole by one row that is there already; then,
and where rows may well be there, it is COPY into a staging table and one guarded upsert. A row that its table refuses
is found by halving, so it never takes others with it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import asyncpg

from ledger.audit.rows import COLUMNS, Row
from ledger.copy_format import stream
from ledger.letter_rows import LetterRow
from ledger.postgres import Connection, reason
from ledger.statements import statement
from scheduler.failpoints import failpoint

ROWS_A_TRANSACTION = 1000
"""Encoding so many takes about 3 ms, in which nothing else in the process runs."""

BYTES_A_TRANSACTION = 8 << 20
"""Bodies of dead letters are large where inputs are; so much is written well within a statement's time."""

STAGING = "audit_staging"
STAGING_ROOM = {"temp_buffers": "1MB"}
"""For the session: a transaction's rows fit. PostgreSQL's own 8 MB would fill page by page, and never be given back."""

# What the server says of a value that it cannot store, and what asyncpg says of one that it cannot even encode.
REFUSALS = (asyncpg.DataError, ValueError, TypeError, OverflowError)

# What the server says where a column has another type than the migrations gave it, or there are others.
OTHER_COLUMNS = (asyncpg.InvalidBinaryRepresentationError, asyncpg.BadCopyFileFormatError)


class Refused(NamedTuple):
    """A row that PostgreSQL will never take, and why."""

    row: Row | LetterRow
    why: str


async def prepare(connection: Connection) -> None:
    """Make the session's staging table."""
    await connection.execute(statement("audit_staging"))


async def write_rows(
    connection: Connection, rows: Sequence[Row | LetterRow], timeout_s: float, *, new: bool = False
) -> list[Refused]:
    """Write all rows but those refused, which come back. When this returns, the others are committed.

    Ids must not repeat within the rows of one table. `new`: none is expected to be there; it costs time where that is
    wrong, and nothing else. Raises what asyncpg raises, or TimeoutError after `timeout_s` for a transaction; writing
    the same rows again is then right and changes nothing that was committed.
    """
    refused: list[Refused] = []
    parts = [(part, new) for part in (_slices(rows) if new else _parts(rows))]
    while parts:
        part, new = parts.pop()
        try:
            async with asyncio.timeout(timeout_s):
                await _write(connection, part, new=new)
        except (*REFUSALS, asyncpg.IntegrityConstraintViolationError) as error:
            if not _is_the_rows_fault(error):
                raise
            if new:
                parts.append((part, False))
            elif len(part) == 1:
                refused.append(Refused(part[0], reason(error)))
            else:
                middle = len(part) // 2
                parts += [(part[middle:], False), (part[:middle], False)]
    return refused


def _slices(rows: Sequence[Row | LetterRow]) -> Iterator[Sequence[Row | LetterRow]]:
    return (rows[at : at + ROWS_A_TRANSACTION] for at in range(0, len(rows), ROWS_A_TRANSACTION))


def _parts(rows: Sequence[Row | LetterRow]) -> Iterator[Sequence[Row | LetterRow]]:
    """What each transaction writes."""
    begin = size = 0
    for at, row in enumerate(rows):
        own = len(row.body or b"") if isinstance(row, LetterRow) else 0
        if at > begin and (at - begin >= ROWS_A_TRANSACTION or size + own > BYTES_A_TRANSACTION):
            yield rows[begin:at]
            begin, size = at, 0
        size += own
    if rows:
        yield rows[begin:]


async def _write(connection: Connection, rows: Sequence[Row | LetterRow], *, new: bool) -> None:
    async with connection.transaction():
        if new:
            await _copy(connection, "requests", cast("Sequence[Row]", rows))
        else:
            await _merge(connection, rows)
        failpoint("audit_uncommitted")


async def _merge(connection: Connection, rows: Sequence[Row | LetterRow]) -> None:
    letters = [row for row in rows if isinstance(row, LetterRow)]
    requests = [row for row in rows if not isinstance(row, LetterRow)]
    if requests:
        await _copy(connection, STAGING, requests)
        await connection.execute(statement("merge_requests"))
    if letters:
        await connection.executemany(statement("insert_dead_letters"), letters)


async def _copy(connection: Connection, table: str, rows: Sequence[Row]) -> None:
    await connection.copy_to_table(table, source=stream(rows), columns=COLUMNS, format="binary")


def _is_the_rows_fault(error: Exception) -> bool:
    """Whether another row in its place could be stored; if not, setting it aside would set all aside.

    A missing partition, too, is called a check violation, but one without a constraint.
    """
    if isinstance(error, OTHER_COLUMNS):
        return False
    return not isinstance(error, asyncpg.CheckViolationError) or bool(error.constraint_name)
