"""Connections to PostgreSQL with their timeouts and errors, advisory locks, and the named queries of ledger/sql/.

A pooler such as PgBouncer may sit in front of PostgreSQL. In session mode a connection keeps one session of PostgreSQL, as
LISTEN, advisory locks and settings need. In transaction mode each transaction may run in another session. `connect` refuses
such a pooler, unless the URL is one of `pooled`: then each statement has a transaction, with the settings.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import asyncpg

if TYPE_CHECKING:  # asyncpg's Connection is generic in its type stubs only.
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection

SCHEME = "postgresql+asyncpg"
POOLED_SCHEME = "postgresql+pooled"
VALID_URL = (
    "postgresql://user:password@host:port/database, with each / ? # @ of the password percent-encoded, as in %2F"
)
"""What a URL must be. asyncpg's own errors quote the part of the password that it took for a port."""

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

PROBES = 5
PROBE_TIMEOUT_S = 1.0
AT_ONCE_S = 0.25
"""How long a connection with a session of its own may take to answer. One that waits for a busy pool takes longer."""

_HOST = r"(?:\[[\w:.%]+\]|[^\s/?#@:,\[\]]*)(?::\d*)?"
_WITH_AT = r"(?:user|password|passfile|host|dbname|database|application_name|options|ssl\w+)="
_PAIR = rf"(?:{_WITH_AT}[^#&]*|(?!{_WITH_AT})[^#&@]*)"
_URL = re.compile(
    rf"[^:/]+://(?:(?P<login>.*?)@)??(?P<hosts>{_HOST}(?:,{_HOST})*)(?P<path>/[^?#@]*)?"
    rf"(?:\?(?P<query>{_PAIR}(?:&{_PAIR})*))?(?:#[^@]*)?",
    re.DOTALL,
)
"""The login ends at the first @ after which everything is as in a URL, so that no part of a password counts as a host."""


class SharedSession(asyncpg.InterfaceError):
    """A pooler runs each transaction in another session of PostgreSQL. The message is a sentence without its full stop."""


class PooledConnection(Connection):
    """A connection to a pooler in any mode. `settings` hold in each transaction.

    Every statement has a transaction: a pooler may send its preparation and its execution to different sessions otherwise.
    """

    settings: Mapping[str, str] = {}

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str:
        """As asyncpg; the first statement of a transaction also makes the settings, in the same call."""
        if self.is_in_transaction():
            return await super().execute(query, *args, timeout=timeout)
        if query.startswith("BEGIN"):
            return await super().execute(f"{query}; {_set(self.settings, local=True)}", timeout=timeout)
        async with self.transaction():
            return await super().execute(query, *args, timeout=timeout)

    async def _execute(self, *args: Any, **options: Any) -> Any:
        """Called by asyncpg for a statement with results or arguments."""
        if self.is_in_transaction():
            return await super()._execute(*args, **options)  # type: ignore[misc]
        async with self.transaction():
            return await super()._execute(*args, **options)  # type: ignore[misc]


def pooled(database_url: str) -> str:
    """The URL of a pooler that may run each transaction in another session."""
    return f"{POOLED_SCHEME}://{database_url.partition('://')[2]}"


def asyncpg_dsn(database_url: str) -> str:
    """Convert a URL of any of the schemes to asyncpg's form."""
    _, separator, rest = database_url.partition("://")
    address, mark, query = rest.partition("?")
    # asyncpg sends a parameter that it does not know to the server as a setting, and the server rejects it.
    pairs = [("sslmode" if key == "ssl" else key, value) for key, value in parse_qsl(query)]
    return f"postgresql{separator}{address}{mark}{urlencode(pairs, safe='/', quote_via=quote)}"


def place_of(database_url: str) -> str:
    """Hosts and database of a URL, without user and password, for error messages. The URL may be invalid."""
    found = _URL.fullmatch(database_url)
    if found is None:
        return "an invalid URL"
    hosts = found["hosts"] or dict(parse_qsl(found["query"] or "")).get("host", "localhost")
    return f"{hosts}{found['path'] or ''}"


def is_valid_url(database_url: str) -> bool:
    """Whether asyncpg finds the hosts of a URL where `place_of` does: an unescaped character may end the password."""
    found = _URL.fullmatch(database_url)
    try:
        urlsplit(database_url)  # It also rejects letters that Unicode makes equal to a separator.
    except ValueError:
        return False
    return found is not None and set("/?#@").isdisjoint(found["login"] or "")


async def connect(
    database_url: str,
    *,
    name: str,
    connect_timeout_s: float,
    statement_timeout_ms: int,
    settings: Mapping[str, str] | None = None,
) -> Connection:
    """Connect with `name` as the application name in pg_stat_activity. `statement_timeout_ms` 0: no timeout.

    Raises AWAY, SharedSession among them, or ValueError for an invalid URL, which the error does not quote.
    """
    if not is_valid_url(database_url):
        raise ValueError(f"the URL must be {VALID_URL}")
    session = {"statement_timeout": str(statement_timeout_ms), **(settings or {})}
    # Later than the server's own timeout: it applies when the network fails.
    command_timeout_s = statement_timeout_ms / 1000 + 1.0 if statement_timeout_ms else None
    if database_url.startswith(POOLED_SCHEME):
        connection = await _open_pooled(database_url, name, connect_timeout_s, command_timeout_s)
        connection.settings = session
        return connection
    plain = await asyncpg.connect(
        asyncpg_dsn(database_url),
        timeout=connect_timeout_s,
        command_timeout=command_timeout_s,
        server_settings=_startup(name),
    )
    try:
        await _use_session(plain, database_url, session, connect_timeout_s)
    except BaseException:
        plain.terminate()
        raise
    return plain


async def _open_pooled(
    database_url: str, name: str, connect_timeout_s: float, command_timeout_s: float | None
) -> PooledConnection:
    return await asyncpg.connect(
        asyncpg_dsn(database_url),
        timeout=connect_timeout_s,
        command_timeout=command_timeout_s,
        server_settings=_startup(name),
        connection_class=PooledConnection,
        statement_cache_size=0,
    )


def _startup(name: str) -> dict[str, str]:
    """The settings that PgBouncer accepts when a connection starts; it keeps them for the connection in any mode."""
    return {"application_name": name, "timezone": "UTC"}


def _set(settings: Mapping[str, str], *, local: bool) -> str:
    """A statement that makes settings, of the transaction or of the session."""
    calls = ", ".join(f"set_config('{name}', '{value}', {str(local).lower()})" for name, value in settings.items())
    return f"SELECT {calls}"


async def _use_session(
    connection: Connection, database_url: str, settings: Mapping[str, str], timeout_s: float
) -> None:
    """Make the settings, if the connection keeps its session. Raises SharedSession, or TimeoutError while a pool is busy.

    With PostgreSQL itself this is one call: the server's process has the id that was sent when the connection started, and
    through a pooler another one, with which the statement changes nothing.
    """
    text = _set(settings, local=False)
    made = await connection.execute(f"{text} WHERE pg_backend_pid() = {connection.get_server_pid()}", timeout=timeout_s)
    if made == "SELECT 1":
        return
    if await _shares_session(connection, database_url, timeout_s):
        raise SharedSession(
            f"{place_of(database_url)} is a pooler in transaction mode, but LISTEN and advisory locks need a persistent "
            "session: set TIERLANE_DATABASE_DIRECT_URL to PostgreSQL itself"
        )
    await connection.execute(text, timeout=timeout_s)


async def _shares_session(connection: Connection, database_url: str, timeout_s: float) -> bool:
    """Whether a pooler gives the session of a connection, which is open and idle, to another one, or changes that one's.

    Raises TimeoutError if that cannot be seen now.
    """
    # In a transaction, and without a name for the statement: behind a pooler its preparation may be in another session.
    async with asyncio.timeout(timeout_s), connection.transaction():
        prepared = await connection.prepare("SELECT pg_backend_pid()", name="")
        own = int(await prepared.fetchval())
    try:
        async with closing(await _open_pooled(database_url, "tierlane-probe", timeout_s, PROBE_TIMEOUT_S)) as other:
            for _ in range(PROBES):
                first, second = [await other.fetchval("SELECT pg_backend_pid()") for _ in range(2)]
                if first != second or await _is_served_by(connection, second, timeout_s):
                    return True
    except TimeoutError:
        # No session is left for the probe. In session mode that is because idle connections keep theirs, as this one does;
        # in transaction mode all are busy, so that this connection has to wait for one, too.
        if not await _is_served_by(connection, own, AT_ONCE_S):
            raise
    return False


async def _is_served_by(connection: Connection, backend_pid: int, timeout_s: float) -> bool:
    made = await connection.execute(f"SELECT WHERE pg_backend_pid() = {backend_pid}", timeout=timeout_s)
    return made == "SELECT 1"


def is_behind_pooler(connection: Connection, backend_pid: int) -> bool:
    """Whether the process that serves a statement, which `pg_backend_pid()` returns, is not the one that was connected to."""
    return backend_pid != connection.get_server_pid()


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
