"""Connections to PostgreSQL with their timeouts and errors, advisory locks, and the named queries of ledger/sql/."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import asyncpg

if TYPE_CHECKING:  # asyncpg's Connection is generic in its type stubs only.
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection

SCHEME = "postgresql+asyncpg"
CLOSE_TIMEOUT_S = 1.0
AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""Errors of a query while PostgreSQL is not available, slow, or in the wrong state. Callers keep their state and retry.

A connection that is closed during a call raises asyncpg.InterfaceError, or InternalClientError in a short moment.
"""

MIGRATION_LOCK = 7_436_001
AUDITOR_LOCK = 7_436_002
JOBS_LOCK = 7_436_003
"""Keys of the advisory locks."""

LEADER_CONNECT_TIMEOUT_S = 3.0
LEADER_SETTINGS = {"idle_session_timeout": "15s", "idle_in_transaction_session_timeout": "10s"}
"""Settings of a session that holds an advisory lock. A process that is suspended for longer loses its session and its lock,
so that another process can take over.
"""


def asyncpg_dsn(database_url: str) -> str:
    """Convert a SQLAlchemy URL to asyncpg's form. A URL in asyncpg's form is returned unchanged."""
    scheme, separator, rest = database_url.partition("://")
    if scheme != SCHEME:
        return database_url
    address, mark, query = rest.partition("?")
    # asyncpg sends a parameter that it does not know to the server as a setting, and the server rejects it.
    pairs = [("sslmode" if key == "ssl" else key, value) for key, value in parse_qsl(query)]
    return f"postgresql{separator}{address}{mark}{urlencode(pairs, safe='/', quote_via=quote)}"


def place_of(database_url: str) -> str:
    """Host and database of a URL, without user and password, for error messages."""
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
    """Connect with `name` as the application name in pg_stat_activity. Raises AWAY, or ValueError for an invalid URL."""
    return await asyncpg.connect(
        asyncpg_dsn(database_url),
        timeout=connect_timeout_s,
        # Later than the server's own timeout: it applies when the network fails.
        command_timeout=statement_timeout_ms / 1000 + 1.0,
        server_settings={
            "application_name": name,
            "statement_timeout": str(statement_timeout_ms),
            "timezone": "UTC",
            **(settings or {}),
        },
    )


async def wait_for_lock(connection: Connection, lock: int, pool: str, stand_by: Callable[[], Awaitable[bool]]) -> bool:
    """Wait until this session holds the advisory lock `lock` of the pool, and so is the leader.

    The lock ends with the session. `stand_by` is awaited after each failed attempt; if it returns False, so does this.
    """
    while not await connection.fetchval("SELECT pg_try_advisory_lock($1, hashtext($2))", lock, pool):
        if not await stand_by():
            return False
    return True


def reason(error: BaseException) -> str:
    """The first line of an error, or its type if it has no text."""
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".") if lines else type(error).__name__
    if isinstance(error, asyncpg.UndefinedTableError | asyncpg.UndefinedColumnError):
        return f"{text}; run `tierlane migrate`"
    return text


@asynccontextmanager
async def closing(connection: Connection) -> AsyncIterator[Connection]:
    """Close the connection at the end of the block; terminate it after an error, or if it does not close in time."""
    try:
        yield connection
    except BaseException:
        connection.terminate()
        raise
    try:
        await connection.close(timeout=CLOSE_TIMEOUT_S)
    except AWAY:
        connection.terminate()


def statement(name: str) -> str:
    """The query that is named `name` in ledger/sql/. Raises LookupError if there is none."""
    try:
        return _statements()[name]
    except KeyError:
        raise LookupError(f"No file in ledger/sql/ has a query named {name!r}.") from None


@cache
def _statements() -> dict[str, str]:
    """All queries by name. In each file a line `-- name: NAME` starts a query; lines before the first are comments."""
    found: dict[str, str] = {}
    for file in files("ledger").joinpath("sql").iterdir():
        _, *parts = re.split(r"^-- name: (\w+)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            if name in found:
                raise ValueError(f"{file.name} has a second query named {name!r}.")
            found[name] = text.strip()
    return found
