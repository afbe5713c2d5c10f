"""URLs of PostgreSQL, and how a pooler in transaction mode is recognised."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ledger import postgres
from ledger.postgres import PROBES, _shares_session, asyncpg_dsn, connect, is_valid_url, place_of, pooled


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg", "postgresql+pooled"])
def test_every_scheme_is_that_of_asyncpg(scheme: str) -> None:
    """`ssl` is accepted for libpq's `sslmode`; other parameters stay."""
    url = f"{scheme}://user:p%40ss@host:5432/db?ssl=verify-full&sslrootcert=/etc/tls/ca.crt"

    assert asyncpg_dsn(url) == "postgresql://user:p%40ss@host:5432/db?sslmode=verify-full&sslrootcert=/etc/tls/ca.crt"
    assert asyncpg_dsn(pooled(url)) == asyncpg_dsn(url)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://user:hunter2@host:5432/db?ssl=require", "host:5432/db"),
        ("postgres://user:hunter2@host1:5432,host2:5433/db?target_session_attrs=primary", "host1:5432,host2:5433/db"),
        ("postgresql+asyncpg://user@/db?host=/run/sockets", "/run/sockets/db"),
        ("postgresql:///db", "localhost/db"),
        ("postgresql://[::1]:5432/db", "[::1]:5432/db"),
        ("postgresql://host/db?user=me@corp&password=hunter2@x", "host/db"),
        ("postgresql+pooled://us%40er:hunt%2Fer2@host/db", "host/db"),
    ],
)
def test_messages_name_hosts_without_password(url: str, place: str) -> None:
    """Several hosts, too."""
    assert place_of(url) == place
    assert is_valid_url(url)


@pytest.mark.parametrize(
    "password", ["{}/w", "{}#w", "{}?w", "{}@w", "1/{}", "1?{}=x", "1#{}", "a@1/{}", "a@b?x={}", "a@{}"]
)
@pytest.mark.parametrize("address", ["host:5432/db", "host1,host2:1/db?sslmode=require"])
async def test_a_password_that_is_not_escaped_is_never_shown(password: str, address: str) -> None:
    """A part of it would count as the host, the port or the database, and errors of asyncpg would quote it."""
    url = f"postgresql://user:{password.format('hunter2')}@{address}"

    assert place_of(url) == address.partition("?")[0]
    assert not is_valid_url(url)
    for called in (url, pooled(url)):
        with pytest.raises(ValueError, match=r"^the URL must be postgresql://") as error:
            await connect(called, name="tests", connect_timeout_s=0.1, statement_timeout_ms=0)
        assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("url", ["postgresql://user:hunter2@host:port/db", "host/hunter2", "postgresql://u:[hunter2@/"])
def test_an_invalid_url_is_not_shown(url: str) -> None:
    """Nothing of it is known."""
    assert not is_valid_url(url)
    assert "hunter2" not in place_of(url)


class OneSession:
    """A connection. `served_by`: the process that serves each statement; None: all sessions are busy."""

    def __init__(self, served_by: Sequence[int | None]) -> None:
        self._served_by = iter(served_by)

    def _pid(self) -> int:
        pid = next(self._served_by)
        if pid is None:
            raise TimeoutError
        return pid

    async def prepare(self, query: str, *, name: str) -> "OneSession":
        assert (query, name) == ("SELECT pg_backend_pid()", "")
        return self

    async def fetchval(self, *_: str) -> int:
        return self._pid()

    async def execute(self, query: str, *, timeout: float = 0.0) -> str:
        return f"SELECT {int(query.endswith(f'= {self._pid()}'))}"

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        yield

    def terminate(self) -> None:
        """Nothing to do."""

    async def close(self, *, timeout: float) -> None:
        """Nothing to do."""


@pytest.mark.parametrize(
    ("own", "probe", "found"),
    [
        ([7, *[7] * PROBES], [8] * 2 * PROBES, False),  # Session mode.
        ([7, 8], [8, 8], True),  # The probe's session.
        ([7], [8, 9], True),  # The probe changes its own.
        ([7, 7], [None], False),  # Session mode, and no session is left for the probe.
        ([7, None], [None], None),  # All sessions are busy.
        ([7, 8], [None], None),
        ([None], [], None),
    ],
)
async def test_a_busy_pool_is_not_in_session_mode(
    monkeypatch: pytest.MonkeyPatch, own: list[int | None], probe: list[int | None], found: bool | None
) -> None:
    """A probe that gets no session in time says nothing, unless the connection has one of its own. `found` None: try again."""

    async def opened(*_: object) -> OneSession:
        return OneSession(probe)

    monkeypatch.setattr(postgres, "_open_pooled", opened)
    connection: Any = OneSession(own)

    if found is None:
        with pytest.raises(TimeoutError):
            await _shares_session(connection, "postgresql://host/db", 1.0)
    else:
        assert await _shares_session(connection, "postgresql://host/db", 1.0) is found
