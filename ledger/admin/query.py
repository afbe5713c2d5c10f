"""Statements of SQLAlchemy run by asyncpg: what they say is built from the tables, so names and types stand once."""

from typing import Any

from sqlalchemy.dialects.postgresql import asyncpg
from sqlalchemy.sql.expression import ClauseElement

from ledger.postgres import Connection

Row = dict[str, Any]
"""A row by its columns' names."""

_DIALECT: Any = asyncpg.dialect()  # type: ignore[no-untyped-call]


async def fetch(connection: Connection, query: ClauseElement) -> list[Row]:
    """Run a statement; its rows. Raises what asyncpg raises."""
    compiled: Any = query.compile(dialect=_DIALECT)
    values = [compiled.params[name] for name in compiled.positiontup or ()]
    return [dict(row) for row in await connection.fetch(str(compiled), *values)]


async def fetch_one(connection: Connection, query: ClauseElement) -> Row | None:
    """Run a statement; its first row, None where it has none. Raises what asyncpg raises."""
    rows = await fetch(connection, query)
    return rows[0] if rows else None
