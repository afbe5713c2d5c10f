"""URLs of PostgreSQL."""

import pytest

from ledger.postgres import asyncpg_dsn, place_of, pooled


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
    ],
)
def test_messages_name_hosts_without_password(url: str, place: str) -> None:
    """Several hosts, too."""
    assert place_of(url) == place
