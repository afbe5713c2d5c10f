"""Audit rows into PostgreSQL: COPY into a staging table and one guarded upsert, in one transaction.

COPY straight into `requests` would be lost whole by one duplicate. A row that the table refuses is found by halving,
so it never takes others with it.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import asyncpg

from ledger.audit_rows import COLUMNS, Row
from ledger.postgres import Connection, reason
from ledger.statements import statement

ROWS_A_TRANSACTION = 1000
"""Encoding so many takes about 3 ms, in which nothing else in the process runs."""

STAGING = "audit_staging"
# What the server says of a value that it cannot store, and what asyncpg says of one that it cannot even encode.
REFUSALS = (asyncpg.DataError, ValueError, TypeError, OverflowError)


class Refused(NamedTuple):
    """A row that PostgreSQL will never take, and why."""

    row: Row
    why: str


async def prepare(connection: Connection) -> None:
    """Make the session's staging table."""
    await connection.execute(statement("audit_staging"))


async def write_rows(connection: Connection, rows: Sequence[Row], timeout_s: float) -> list[Refused]:
    """Write all rows but those refused, which come back. When this returns, the others are committed.

    Ids must not repeat within `rows`. Raises what asyncpg raises, or TimeoutError after `timeout_s` for a transaction;
    writing the same rows again is then right and changes nothing that was committed.
    """
    refused: list[Refused] = []
    parts = [rows[at : at + ROWS_A_TRANSACTION] for at in range(0, len(rows), ROWS_A_TRANSACTION)]
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


async def _write(connection: Connection, rows: Sequence[Row]) -> None:
    async with connection.transaction():
        await connection.copy_records_to_table(STAGING, records=rows, columns=COLUMNS)
        await connection.execute(statement("merge_requests"))


def _is_the_rows_fault(error: Exception) -> bool:
    """A missing partition, too, is called a check violation, but one without a constraint; the row is good then."""
    return not isinstance(error, asyncpg.CheckViolationError) or bool(error.constraint_name)
