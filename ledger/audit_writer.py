"""Audit rows and dead letters into PostgreSQL, in one transaction: COPY into a staging table and one guarded upsert.

COPY straight into `requests` would be lost whole by one duplicate. A row that its table refuses is found by halving,
so it never takes others with it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import asyncpg

from ledger.audit_rows import COLUMNS, Row
from ledger.letter_rows import LetterRow
from ledger.postgres import Connection, reason
from ledger.statements import statement
from scheduler.failpoints import failpoint

ROWS_A_TRANSACTION = 1000
"""Encoding so many takes about 3 ms, in which nothing else in the process runs."""

BYTES_A_TRANSACTION = 8 << 20
"""Bodies of dead letters are large where inputs are; so much is written well within a statement's time."""

STAGING = "audit_staging"
# What the server says of a value that it cannot store, and what asyncpg says of one that it cannot even encode.
REFUSALS = (asyncpg.DataError, ValueError, TypeError, OverflowError)


class Refused(NamedTuple):
    """A row that PostgreSQL will never take, and why."""

    row: Row | LetterRow
    why: str


async def prepare(connection: Connection) -> None:
    """Make the session's staging table."""
    await connection.execute(statement("audit_staging"))


async def write_rows(connection: Connection, rows: Sequence[Row | LetterRow], timeout_s: float) -> list[Refused]:
    """Write all rows but those refused, which come back. When this returns, the others are committed.

    Ids must not repeat within the rows of one table. Raises what asyncpg raises, or TimeoutError after `timeout_s` for
    a transaction; writing the same rows again is then right and changes nothing that was committed.
    """
    refused: list[Refused] = []
    parts = list(_parts(rows))
    while parts:
        part = parts.pop()
        try:
            async with asyncio.timeout(timeout_s):
                await _write(connection, part)
        except (*REFUSALS, asyncpg.IntegrityConstraintViolationError) as error:
            if not _is_the_rows_fault(error):
                raise
            if len(part) == 1:
                refused.append(Refused(part[0], reason(error)))
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
    return refused


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


async def _write(connection: Connection, rows: Sequence[Row | LetterRow]) -> None:
    letters = [row for row in rows if isinstance(row, LetterRow)]
    requests = [row for row in rows if not isinstance(row, LetterRow)]
    async with connection.transaction():
        if requests:
            await connection.copy_records_to_table(STAGING, records=requests, columns=COLUMNS)
            await connection.execute(statement("merge_requests"))
        if letters:
            await connection.executemany(statement("insert_dead_letters"), letters)
        failpoint("audit_uncommitted")


def _is_the_rows_fault(error: Exception) -> bool:
    """A missing partition, too, is called a check violation, but one without a constraint; the row is good then."""
    return not isinstance(error, asyncpg.CheckViolationError) or bool(error.constraint_name)
