"""Keys that SQL issues and keys that Python verifies are the same keys."""

import re
import time
from typing import Any
from zlib import crc32

import asyncpg
import pytest

from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.api_key import mint, parse, verify
from ledger.catalog.loader import load
from scheduler.errors import ErrorCode, RequestError

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


async def test_a_key_issued_by_sql_is_verified_by_python(db: Connection) -> None:
    """The same form, the same checksum, the same hash; with the identity of its customer."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    keys = [await db.fetchval("SELECT issue_api_key('acme', $1)", f"key {n}") for n in range(20)]
    snapshot = await load(db)

    assert len(set(keys)) == 20
    form = re.sub(r"[0-9a-zA-Z]", "x", mint().text)
    for key in keys:
        assert re.sub(r"[0-9a-zA-Z]", "x", key) == form
        identity = verify(key, snapshot, time.time())
        assert (identity.customer_name, identity.tier, identity.key_id) == ("acme", "paid", key[3:15])


async def test_nothing_stored_gives_the_key_away(db: Connection) -> None:
    """Neither the key nor its secret is in any table."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    key = await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    stored = str(await db.fetch("SELECT a, c FROM api_keys a, config_changes c"))

    assert key[3:15] in stored
    assert key[16:44] not in stored
    assert str(parse(key)) not in stored


async def test_expiry_is_that_of_the_database(db: Connection) -> None:
    """The optional third argument; the comparison is with the time given."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    key = await db.fetchval("SELECT issue_api_key('acme', 'ci', to_timestamp(4000000000.5))")
    snapshot = await load(db)

    assert verify(key, snapshot, 4000000000.4).customer_name == "acme"
    with pytest.raises(RequestError) as refused:
        verify(key, snapshot, 4000000000.6)
    assert refused.value.code is ErrorCode.INVALID_API_KEY


@pytest.mark.parametrize("customer", ["nobody", "", None])
async def test_an_unknown_customer_is_said_so(db: Connection, customer: str | None) -> None:
    """The admin hears the name that was given and where to look."""
    with pytest.raises(asyncpg.NoDataFoundError, match="there is no customer named") as refused:
        await db.fetchval("SELECT issue_api_key($1, 'ci')", customer)

    assert "SELECT name FROM customers" in refused.value.hint


@pytest.mark.parametrize("text", [b"", b"123456789", bytes(range(256)), b"tl_abc_def"])
async def test_crc32_in_sql_is_zlibs(db: Connection, text: bytes) -> None:
    """Written out for PostgreSQL before 18; the same number."""
    assert await db.fetchval("SELECT tierlane_crc32($1)", text) == crc32(text)
