"""Connections to PostgreSQL, every timeout named, and the statements in ledger/sql.

The URL is given to asyncpg in its own form. Here is also which errors mean "unavailable".
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import asyncpg

if TYPE_CHECKING:  # Only its stubs know that a connection is generic.
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection

SCHEME = "postgresql+asyncpg"
CLOSE_TIMEOUT_S = 1.0
AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)
"""What a query raises when PostgreSQL is away, slow or in the wrong state: the caller keeps what it has and comes back.

asyncpg.InterfaceError is among them because that is what a connection says which was closed under a call.
"""


def asyncpg_dsn(database_url: str) -> str:
    """SQLAlchemy's URL as asyncpg reads it; one in asyncpg's form already comes back unchanged."""
    scheme, separator, rest = database_url.partition("://")
    if scheme != SCHEME:
        return database_url
    address, mark, query = rest.partition("?")
    # asyncpg would send a parameter that it does not know to the server as a setting, and the server would refuse.
    pairs = [("sslmode" if key == "ssl" else key, value) for key, value in parse_qsl(query)]
    return f"postgresql{separator}{address}{mark}{urlencode(pairs, safe='/', quote_via=quote)}"


def place_of(database_url: str) -> str:
    """Host and database of a URL, for an error message: without user and password."""
    parts = urlsplit(database_url)
    query = dict(parse_qsl(parts.query))
    host = parts.hostname or query.get("host", "localhost")
    port = f":{parts.port}" if parts.port else ""
    return f"{host}{port}{parts.path}"


async def connect(
    database_url: str,
    *,
    name: str,
    connect_timeout_s: float,
    statement_timeout_ms: int,
    settings: dict[str, str] | None = None,
) -> Connection:
    """One connection, called `name` in pg_stat_activity. Raises what is in AWAY, or ValueError for a bad URL."""
    return await asyncpg.connect(
        asyncpg_dsn(database_url),
        timeout=connect_timeout_s,
        command_timeout=statement_timeout_ms / 1000 + 1.0,  # For a network that is gone; the server's own is first.
        server_settings={
            "application_name": name,
            "statement_timeout": str(statement_timeout_ms),
            "timezone": "UTC",
            **(settings or {}),
        },
    )


def reason(error: BaseException) -> str:
    """The first line of an error, for a sentence; some errors have no text but their type."""
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".") if lines else type(error).__name__
    if isinstance(error, asyncpg.UndefinedTableError | asyncpg.UndefinedColumnError):
        return f"{text}; run `tierlane migrate`"
    return text


@asynccontextmanager
async def closing(connection: Connection) -> AsyncIterator[Connection]:
    """Close the connection at the end: politely after a good run, at once after an error or when it does not close."""
    try:
        yield connection
    except BaseException:
        connection.terminate()
        raise
    try:
        await connection.close(timeout=CLOSE_TIMEOUT_S)
    except AWAY:
        connection.terminate()


@cache
def statement(name: str) -> str:
    """The text of `ledger/sql/<name>.sql`. Raises FileNotFoundError for one that is not there."""
    return files("ledger").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")
