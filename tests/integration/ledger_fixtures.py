"""PostgreSQL for tests: one server for the session, and a copy of a migrated database for each test.

Import the fixtures by name. The server is in pytest's stash, so that there is one however many modules import it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from itertools import count
from pathlib import Path
from typing import TypeVar

import asyncpg
import pytest

from ledger.migration import upgrade_to_head
from tierlane_local.embedded.postgres import EmbeddedPostgres

_SERVER: pytest.StashKey[EmbeddedPostgres] = pytest.StashKey()
_NUMBERS = count(1)
T = TypeVar("T")


def _run(work: Awaitable[T]) -> T:
    """Run on its own event loop: the server outlives the loops of the tests."""

    async def wrapped() -> T:
        return await work

    return asyncio.run(wrapped())


async def _start(home: Path) -> EmbeddedPostgres:
    server = EmbeddedPostgres(home, home / "socket", ephemeral=True)
    await server.start()
    await _execute(server, "CREATE DATABASE empty")
    await _execute(server, "CREATE DATABASE migrated")
    await upgrade_to_head(server.url_for("migrated"))
    return server


async def _execute(server: EmbeddedPostgres, sql: str) -> None:
    connection = await asyncpg.connect(server.dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EmbeddedPostgres:
    """The server of the session; do not stop it."""
    if _SERVER not in request.config.stash:
        server = _run(_start(tmp_path_factory.mktemp("postgres")))
        request.config.stash[_SERVER] = server
        request.config.add_cleanup(lambda: _run(server.stop()))
    return request.config.stash[_SERVER]


async def copy_of(server: EmbeddedPostgres, template: str) -> str:
    """Create a database from `template`; its URL."""
    name = f"test_{next(_NUMBERS)}"
    await _execute(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    return server.url_for(name)


async def drop(server: EmbeddedPostgres, url: str) -> None:
    """Drop a database of `copy_of`, also with open connections."""
    await _execute(server, f"DROP DATABASE {url.rpartition('?')[0].rpartition('/')[2]} WITH (FORCE)")


@pytest.fixture
async def database_url(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    """The URL of the test's own migrated database."""
    url = await copy_of(postgres_server, "migrated")
    yield url
    await drop(postgres_server, url)


@pytest.fixture
async def empty_url(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    """The URL of the test's own empty database."""
    url = await copy_of(postgres_server, "empty")
    yield url
    await drop(postgres_server, url)


def dsn(database_url: str) -> str:
    """The URL in asyncpg's form."""
    return database_url.replace("+asyncpg", "", 1)


@pytest.fixture
async def db(database_url: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """A connection to the test's own database."""
    connection = await asyncpg.connect(dsn(database_url))
    yield connection
    await connection.close()


async def fill_catalog(db: "asyncpg.Connection[asyncpg.Record]", count: int, known: int = 1) -> list[str]:
    """Add `count` customers c1, c2, ... of the tier paid, each with a key; return `known` more keys of c1."""
    await db.execute(
        "INSERT INTO customers (name, tier) SELECT 'c' || n, 'paid' FROM generate_series(1, $1::int) AS n", count
    )
    await db.execute(
        "INSERT INTO api_keys (id, customer_id, name, secret_hash) "
        "SELECT lpad(substr(name, 2), 12, '0'), id, 'ci', sha256(name::bytea) FROM customers WHERE name ~ '^c[0-9]+$'"
    )
    await db.execute("ANALYZE customers, api_keys, config_changes")  # As autovacuum does within a minute.
    return [await db.fetchval("SELECT issue_api_key('c1', $1)", f"known {n}") for n in range(known)]


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[EmbeddedPostgres]:
    """The test's own migrated server, which it may stop and start."""
    server = EmbeddedPostgres(tmp_path, tmp_path / "socket", extra_args=("-c", "fsync=off"))
    await server.start()
    await upgrade_to_head(server.url)
    yield server
    await server.stop()
