"""The verbs of prices: when a price begins, changes, removal, and errors."""

from typing import Any

import pytest

from integration.admin_fixtures import Admin, customer
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


@pytest.fixture
async def admin(database_url: str, db: Connection) -> Admin:
    await customer(db)
    return Admin(database_url)


async def test_a_price_begins_at_a_time(admin: Admin, db: Connection) -> None:
    """Now unless a time is given; what is not given stays. Earlier prices stay in force for earlier requests."""
    await admin.done("model", "create", "tiny")
    await admin.done("price", "set", "tiny", "--usd-per-gpu-s", "0.002", "--from", "2026-01-01")
    past = await admin.done(
        "price", "set", "tiny", "--usd-per-1000-tokens", "0.1", "--from", "2026-01-02 13:00:00+01:00"
    )
    await admin.done("price", "set", "tiny", "--usd-per-gpu-s", "1,000", "--from", "2100-01-01T12:30")
    now = await admin.done("price", "set", "tiny", "--usd-per-gpu-s", "0.000000000001")

    async def prices() -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for row in await admin.json("price", "list", "tiny")]

    later, current, *past_ones = await prices()
    assert current[2:] == (1e-12, 0.1, "now")
    assert [later, *past_ones] == [
        ("tiny", "2100-01-01T12:30:00Z", 1000, 0.1, "later"),
        ("tiny", "2026-01-02T12:00:00Z", 0.002, 0.1, "past"),
        ("tiny", "2026-01-01T00:00:00Z", 0.002, 0, "past"),
    ]
    assert "The cost of earlier requests changes in exports" in past
    assert "exports" not in now
    assert "0.000000000001" in await admin.done("price", "list")
    assert "price of tiny from 2026-01-02 12:00:00 UTC on" in past


async def test_a_price_is_changed_and_removed(admin: Admin, db: Connection) -> None:
    """One that begins at the same second is replaced; the same price again changes nothing. Both are recorded."""
    await admin.done("model", "create", "tiny")
    assert await admin.done("price", "list") == "No prices.\n"
    for price in ("1", "2", "2"):
        changed = await admin.done("price", "set", "tiny", "--usd-per-gpu-s", price, "--from", "2026-01-01")
    unchanged = await admin.done("price", "set", "tiny", "--usd-per-gpu-s", "2")
    await admin.done("model", "delete", "tiny")
    await admin.done("price", "set", "tiny", "--usd-per-gpu-s", "3", "--from", "2026-01-02")  # Of earlier requests.

    assert "nothing to change" in changed
    assert "nothing to change" in unchanged
    line = await admin.fault(1, "price", "remove", "tiny", "2026-01-03")
    assert line == (
        "There is no price of tiny from 2026-01-03 00:00:00 UTC on; it has 2026-01-02 00:00:00 UTC, 2026-01-01 00:00:00 UTC."
    )
    await admin.done("price", "remove", "tiny", "2026-01-01 00:00:00 UTC")
    await admin.done("price", "remove", "tiny", "2026-01-02")
    assert await db.fetchval("SELECT count(*) FROM prices") == 0
    await admin.done("model", "create", "tiny")
    for price in ("2000000", "inf", "nan"):
        line = await admin.fault(2, "price", "set", "tiny", "--usd-per-gpu-s", price)
        assert line.startswith("usd_per_gpu_s must be 0 to 1,000,000, not ")
    assert len(await admin.json("config-changes", "--table", "prices")) == 5
