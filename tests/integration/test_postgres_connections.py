"""Connections to PostgreSQL: settings of the session, and of each transaction behind a pooler.

`make surroundings` has the same with PgBouncer.
"""

from typing import Any

import asyncpg
import pytest

from integration.ledger_fixtures import database_url, dsn, postgres_server
from ledger.jobs import DURABLE
from ledger.postgres import closing, connect, is_behind_pooler, pooled

__all__ = ["database_url", "postgres_server"]

CALL: dict[str, Any] = {"name": "tests", "connect_timeout_s": 2.0, "statement_timeout_ms": 5000, "settings": DURABLE}
EXPECTED = ["5s", "on", "UTC", "tests"]


async def settings_of(connection: Any) -> list[str]:
    names = ("statement_timeout", "synchronous_commit", "timezone", "application_name")
    return [await connection.fetchval("SELECT current_setting($1)", name) for name in names]


async def test_a_connection_has_its_settings(database_url: str) -> None:
    """They are made after connecting, so that poolers accept it. Without a statement timeout there is none."""
    async with closing(await connect(dsn(database_url), **CALL)) as connection:
        assert await settings_of(connection) == EXPECTED
        assert not is_behind_pooler(connection, await connection.fetchval("SELECT pg_backend_pid()"))
    async with closing(await connect(database_url, **CALL | {"statement_timeout_ms": 0})) as connection:
        assert await connection.fetchval("SHOW statement_timeout") == "0"


async def test_statements_through_a_pooler_have_a_transaction_with_the_settings(database_url: str) -> None:
    """A single one, several in a transaction, and after one that failed; an open transaction stays one, nothing else does."""
    async with closing(await connect(pooled(database_url), **CALL)) as connection:
        assert await settings_of(connection) == EXPECTED
        await connection.execute("CREATE TABLE things (number int); INSERT INTO things VALUES (1)")
        assert await connection.execute("INSERT INTO things VALUES ($1)", 2) == "INSERT 0 1"
        with pytest.raises(asyncpg.DivisionByZeroError):
            await connection.execute("SELECT 1 / $1::int", 0)
        with pytest.raises(asyncpg.UndefinedTableError):
            await connection.execute("DELETE FROM nothing")
        transaction = connection.transaction()
        await transaction.start()
        assert await settings_of(connection) == EXPECTED
        await connection.execute("DELETE FROM things WHERE number = $1", 1)
        await transaction.rollback()
        async with connection.transaction(readonly=True), connection.transaction():
            assert [row[0] async for row in connection.cursor("SELECT number FROM things ORDER BY 1")] == [1, 2]
        assert not connection.is_in_transaction()
