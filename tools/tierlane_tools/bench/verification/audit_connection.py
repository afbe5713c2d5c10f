"""Connections to the database of the audit, for short queries."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledger.postgres import Connection, closing, connect

CONNECT_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_MS = 30_000


@asynccontextmanager
async def audit_connection(database_url: str) -> AsyncIterator[Connection]:
    """A connection for one look. Raises what `ledger.postgres.AWAY` names, and ValueError for a URL that is none."""
    connection = await connect(
        database_url,
        name="tierlane bench",
        connect_timeout_s=CONNECT_TIMEOUT_S,
        statement_timeout_ms=STATEMENT_TIMEOUT_MS,
    )
    async with closing(connection):
        yield connection
