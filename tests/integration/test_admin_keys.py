"""The verbs of API keys and webhook secrets: creation, limits, models, rotation and revocation."""

import time
from typing import Any

import pytest

from gateway.jobs.webhook_security import customer_key, secret_bytes, secret_text
from integration.admin_fixtures import Admin, acme, admin
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.api_key import verify
from ledger.catalog.loader import load
from scheduler.errors import RequestError

__all__ = ["acme", "admin", "database_url", "db", "postgres_server"]

Connection = Any
HOUR, DAY = 3600.0, 86_400.0


async def works(db: Connection, key: str, after_s: float = 0.0) -> bool:
    """Whether a gateway that has just read the catalog accepts the key at this time from now."""
    try:
        verify(key, await load(db), time.time() + after_s)
    except RequestError:
        return False
    return True


async def test_a_key_is_printed_once_and_works(admin: Admin, db: Connection) -> None:
    """A key is printed when it is issued; no table and no later output has its secret."""
    lines = (await admin.done("key", "create", "acme", "text")).splitlines()
    key = lines[lines.index("The key, shown only once:") + 1]
    expiring = (await admin.json("key", "create", "acme", "json", "--expires-in", "30d"))["key"]

    for issued in (key, expiring):
        secret = issued.split("_")[2]
        assert await works(db, issued)
        assert secret not in str(await db.fetch("SELECT k, c FROM api_keys k, config_changes c"))
        assert secret not in await admin.done("key", "list") + await admin.done("key", "show", issued[3:15])
    assert await works(db, key, 100 * 365 * DAY)
    assert [await works(db, expiring, days * DAY) for days in (29.9, 30.1)] == [True, False]


async def test_a_key_can_have_its_own_limit(admin: Admin, db: Connection) -> None:
    """A rate without a burst gets a bucket of one second, at least one request."""
    for options, limit in (("5 --burst 20", (5.0, 20.0)), ("5", (5.0, 5.0)), ("0.1", (0.1, 1.0)), ("none", (0.0, 0.0))):
        key = (await admin.json("key", "create", "acme", "ci", "--requests-per-second", *options.split()))["key"]
        identity = verify(key, await load(db), time.time())
        assert (identity.key_rate, identity.key_burst) == limit


async def test_models_of_a_customer_and_a_key(admin: Admin, db: Connection, acme: str) -> None:
    """A key can only have models of its customer; `none` allows all; a rotation keeps the list; unknown names are rejected."""
    for name in ("tiny", "large", "huge"):
        await admin.done("model", "create", name)
    await admin.done("customer", "set", "acme", "--models", "tiny, large,tiny")
    key = (await admin.json("key", "create", "acme", "ci", "--models", "large"))["key"]
    rotated = (await admin.json("key", "rotate", key[3:15]))["key"]
    plain = (await admin.json("key", "create", "acme", "all"))["key"]

    async def models(text: str) -> tuple[str, ...] | None:
        return verify(text, await load(db), time.time()).models

    assert [await models(each) for each in (key, rotated, plain)] == [("large",), ("large",), ("tiny", "large")]
    assert await admin.fault(1, "customer", "set", "acme", "--models", "tyni") == (
        "There is no model named tyni; there are huge, large, tiny."
    )
    assert await admin.fault(1, "key", "set", key, "--models", "tiny,huge") == (
        "Customer acme may not use the model huge, only tiny, large."
    )
    await admin.done("key", "set", key, "--models", "tiny", "--requests-per-second", "5", "--burst", "9")
    await admin.done("customer", "set", "acme", "--models", "none")
    assert [await models(each) for each in (key, rotated, plain)] == [("tiny",), ("large",), None]
    await admin.done("key", "set", key[3:15], "--models", "none")
    assert await models(key) is None
    assert verify(key, await load(db), time.time()).key_burst == 9.0
    await admin.done("customer", "set", "acme", "--models", "tiny,huge")
    assert "tiny, huge" in await admin.done("customer", "show", "acme")
    assert "tiny, huge" in await admin.done("customer", "list")


async def test_a_rotation_keeps_both_keys_for_the_grace_time(admin: Admin, db: Connection) -> None:
    """The new key has the name, limit and lifetime of the old one; the old key ends no later than before."""
    limit = ("--requests-per-second", "5", "--burst", "9")
    old = (await admin.json("key", "create", "acme", "ci", "--expires-in", "10h", *limit))["key"]
    new = (await admin.json("key", "rotate", old[3:15]))["key"]
    newest = (await admin.json("key", "rotate", new[3:15], "--grace", "1h", "--expires-in", "30d"))["key"]

    for key, before, after in ((old, 9.9, 10.1), (new, 0.9, 1.1), (newest, 29.9 * 24, 30.1 * 24)):
        assert [await works(db, key, hours * HOUR) for hours in (before, after)] == [True, False]
    identities = [verify(key, await load(db), time.time()) for key in (old, new, newest)]
    assert len({(i.customer_id, i.key_rate, i.key_burst) for i in identities}) == 1
    assert await db.fetchval("SELECT array_agg(DISTINCT name) FROM api_keys") == ["ci"]


async def test_a_revoked_key_cannot_be_used_or_rotated(admin: Admin, db: Connection) -> None:
    """A whole key is accepted for its id, and its secret is not printed; a second `revoke` changes nothing."""
    key = (await admin.json("key", "create", "acme", "ci"))["key"]

    first = await admin.done("key", "revoke", key)
    second = await admin.done("key", "revoke", key[3:15])
    refused = await admin.fault(1, "key", "rotate", key)

    assert not await works(db, key)
    assert second == f"key {key[3:15]}: nothing to change\n"
    assert refused.startswith(f"Key {key[3:15]} cannot be rotated: it is revoked since 20")
    assert key[16:] not in first + second + refused
    assert (await admin.json("key", "show", key[3:15]))["state"] == "revoked"


async def test_the_webhook_secret_of_a_customer_is_shown(
    admin: Admin, acme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is derived from the deployment's secret; without that the error names the variable."""
    missing = await admin.fault(1, "customer", "show", "acme", "--webhook-secret")
    deployment = secret_text(b"a secret of thirty-two bytes 123")
    monkeypatch.setenv("TIERLANE_CALLBACK_SECRET", deployment)
    secret = secret_text(customer_key(secret_bytes(deployment), acme))

    assert "TIERLANE_CALLBACK_SECRET is not set" in missing
    assert await admin.done("customer", "show", "acme", "--webhook-secret") == f"{secret}\n"
    assert (await admin.json("customer", "show", "acme", "--webhook-secret"))["webhook_secret"] == secret


async def test_the_webhook_secret_of_a_customer_is_rotated(
    admin: Admin, acme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one stays valid for the grace time; `show` prints the new one."""
    deployment = secret_text(b"a secret of thirty-two bytes 123")
    monkeypatch.setenv("TIERLANE_CALLBACK_SECRET", deployment)
    await admin.done("customer", "rotate-secret", "acme", "--dry-run")
    text = await admin.done("customer", "rotate-secret", "acme", "--grace", "2h")
    faults = [
        await admin.fault(2, "customer", "rotate-secret", "acme", "--grace", "5m"),
        await admin.fault(1, "customer", "rotate-secret", "nobody"),
    ]
    row = await admin.json("customer", "show", "acme")
    secret = secret_text(customer_key(secret_bytes(deployment), acme, 2))

    assert await admin.done("customer", "show", "acme", "--webhook-secret") == f"{secret}\n"
    assert (
        "callbacks are also signed with the earlier secrets. `tierlane customer show acme --webhook-secret` prints"
        in text
    )
    assert faults == ["grace must be 1h to 7d.", "There is no customer named nobody."]
    assert (row["webhook_secret"], row["webhook_secret_oldest"]) == (2, 1)
