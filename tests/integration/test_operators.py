"""Operators of the admin API: their verbs, their tokens, and what is recorded about them."""

import json
from typing import Any

import pytest

from integration.admin_fixtures import Admin
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.admin.operators import Operator, find_operator, hash_of

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


@pytest.fixture
def admin(database_url: str) -> Admin:
    return Admin(database_url)


async def found(db: Connection, token: str) -> Operator | None:
    hashed = hash_of(token)
    return None if hashed is None else await find_operator(db, hashed)


async def test_a_token_belongs_to_its_operator_until_it_is_revoked(admin: Admin, db: Connection) -> None:
    """It is printed once; only its hash is stored. A rotated token replaces the old one, also after a revocation."""
    first = (await admin.json("operator", "create", "ann@example.com", "--role", "admin"))["token"]
    owner = await found(db, first)
    await admin.done("operator", "revoke", "ann@example.com")
    revoked = await found(db, first)
    second = (await admin.json("operator", "rotate", "ann@example.com", "--actor", "bob"))["token"]
    (row,) = await admin.json("operator", "list")
    stored = str([dict(each) for each in await db.fetch("SELECT * FROM operators")])

    assert owner == Operator("ann@example.com", "admin")
    assert owner.actor == "operator:ann@example.com"
    assert (revoked, await found(db, first), await found(db, second)) == (None, None, owner)
    assert (row["role"], row["state"]) == ("admin", "live")
    assert not [token for token in (first, second) if token in stored]


async def test_an_expired_token_is_rejected(admin: Admin, db: Connection) -> None:
    """The state of its operator is expired."""
    token = (await admin.json("operator", "create", "ann", "--expires-in", "1d"))["token"]
    live = await found(db, token)
    await db.execute("UPDATE operators SET created_at = now() - interval '2 days', expires_at = now()")
    (row,) = await admin.json("operator", "list")

    assert live == Operator("ann", "viewer")
    assert (await found(db, token), row["state"]) == (None, "expired")


async def test_the_last_use_is_written_once_a_minute_and_not_recorded(admin: Admin, db: Connection) -> None:
    """A use within a minute writes nothing."""
    token = (await admin.json("operator", "create", "ann"))["token"]
    await found(db, token)
    used = await db.fetchval("SELECT last_used_at FROM operators")
    await found(db, token)
    again = await db.fetchval("SELECT last_used_at FROM operators")

    assert used == again is not None
    assert await db.fetchval("SELECT count(*) FROM config_changes WHERE table_name = 'operators'") == 1


async def test_changes_of_operators_are_recorded_without_hashes(admin: Admin, db: Connection) -> None:
    """Gateways do not read operators: the version of the catalog stays."""
    version = await db.fetchval("SELECT version FROM catalog_version")
    await admin.done("operator", "create", "ann", "--actor", "bob")
    await admin.done("operator", "rotate", "ann", "--actor", "bob")
    await admin.done("operator", "revoke", "ann", "--actor", "bob")
    rows = await db.fetch("SELECT changed_by, old, new FROM config_changes WHERE table_name = 'operators' ORDER BY id")
    text = await admin.done("config-changes", "--table", "operators")

    assert [row["changed_by"] for row in rows] == ["bob"] * 3
    assert not [row for row in rows if "hash" in f"{row['old']}{row['new']}"]
    assert json.loads(rows[0]["new"])["role"] == "viewer"
    assert "operator ann" in text
    assert await db.fetchval("SELECT version FROM catalog_version") == version


async def test_faults_are_one_sentence(admin: Admin) -> None:
    """A name in use, an unknown operator, an invalid name and an invalid role; a dry run prints no token."""
    text = await admin.done("operator", "create", "ann", "--dry-run")
    await admin.done("operator", "create", "ann")

    assert "tlo_" not in text
    assert await admin.fault(1, "operator", "create", "ann") == (
        "There is already an operator named ann. `tierlane operator set ann --role ROLE` changes its role, `operator rotate` its token."
    )
    assert "viewer -> admin" in await admin.done("operator", "set", "ann", "--role", "admin")
    assert await admin.fault(1, "operator", "set", "nobody", "--role", "viewer") == "There is no operator named nobody."
    assert await admin.fault(1, "operator", "revoke", "bob") == "There is no operator named bob."
    assert (await admin.fault(2, "operator", "create", "two words")).startswith(
        "name must begin with a letter or digit"
    )


@pytest.mark.parametrize("token", ["", "tlo_", "tl_0123456789ab_x", "tlo_" + "a" * 34, "tlo_" + "é" * 34])
def test_a_token_with_another_form_or_checksum_has_no_hash(token: str) -> None:
    assert hash_of(token) is None
