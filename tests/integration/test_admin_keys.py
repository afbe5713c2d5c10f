"""`tierlane key`: keys that work at once, two of them during a rotation, and none after a revocation."""

import time
from typing import Any

import pytest

from integration.admin_bench import Admin, customer
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.api_key import verify
from ledger.catalog.loader import load
from scheduler.errors import RequestError

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
HOUR, DAY = 3600.0, 86_400.0


@pytest.fixture
async def admin(database_url: str, db: Connection) -> Admin:
    """The command line, with a customer `acme`."""
    await customer(db)
    return Admin(database_url)


async def works(db: Connection, key: str, after_s: float = 0.0) -> bool:
    """Whether a gateway that has just read the catalog takes the key, so much later."""
    snapshot = await load(db)
    try:
        verify(key, snapshot, time.time() + after_s)
    except RequestError:
        return False
    return True


async def test_a_key_is_printed_once_and_works(admin: Admin, db: Connection) -> None:
    """On a line of its own for people, as a field for programs; nothing stored gives it away."""
    lines = (await admin.done("key", "create", "acme", "for people")).splitlines()
    as_json = await admin.json("key", "create", "acme", "for programs", "--expires-in", "30d")
    key = lines[lines.index("The key, shown only once:") + 1]

    for issued in (key, as_json["key"]):
        assert await works(db, issued)
        identity = verify(issued, await load(db), time.time())
        assert (identity.customer_name, identity.key_rate, identity.key_burst) == ("acme", 0.0, 0.0)
        secret = issued.split("_")[2]
        assert secret not in str(await db.fetch("SELECT k, c FROM api_keys k, config_changes c"))
        assert secret not in await admin.done("key", "list") + await admin.done("key", "show", issued[3:15])
    assert await works(db, key, 100 * 365 * DAY)
    assert await works(db, as_json["key"], 30 * DAY - HOUR)
    assert not await works(db, as_json["key"], 30 * DAY + HOUR)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (["--requests-per-second", "5", "--burst", "20"], (5.0, 20.0)),
        (["--requests-per-second", "5"], (5.0, 5.0)),
        (["--requests-per-second", "0.1"], (0.1, 1.0)),
        (["--requests-per-second", "none"], (0.0, 0.0)),
    ],
)
async def test_a_key_can_have_a_limit_of_its_own(
    admin: Admin, db: Connection, options: list[str], limit: tuple[float, float]
) -> None:
    """A rate alone gets a bucket of one second, at least one request."""
    key = (await admin.json("key", "create", "acme", "ci", *options))["key"]

    identity = verify(key, await load(db), time.time())

    assert (identity.key_rate, identity.key_burst) == limit


async def test_a_rotation_leaves_two_live_keys_until_the_grace_is_over(admin: Admin, db: Connection) -> None:
    """The same name and limit; then the new one alone."""
    old = (await admin.json("key", "create", "acme", "ci", "--requests-per-second", "5", "--burst", "9"))["key"]

    said = await admin.done("key", "rotate", old[3:15], "--grace", "2h")

    new = next(line for line in said.splitlines() if line.startswith("tl_"))
    assert "Both keys work until " in said
    for at_s, (first, second) in ((0, (True, True)), (2 * HOUR - 60, (True, True)), (2 * HOUR + 60, (False, True))):
        assert (await works(db, old, at_s), await works(db, new, at_s)) == (first, second)
    identities = [verify(key, await load(db), time.time()) for key in (old, new)]
    assert len({(i.customer_id, i.key_rate, i.key_burst) for i in identities}) == 1
    assert await db.fetchval("SELECT array_agg(DISTINCT name) FROM api_keys") == ["ci"]
    assert [row["state"] for row in await admin.json("key", "list")] == ["live", "live"]


async def test_a_rotation_never_makes_a_key_live_longer(admin: Admin, db: Connection) -> None:
    """The old key ends when it would have; the new one gets the same span of life again, or the one that is given."""
    old = (await admin.json("key", "create", "acme", "ci", "--expires-in", "10h"))["key"]

    new = (await admin.json("key", "rotate", old[3:15]))["key"]
    newest = (await admin.json("key", "rotate", new[3:15], "--grace", "1h", "--expires-in", "30d"))["key"]

    assert [await works(db, old, hours * HOUR) for hours in (9.9, 10.1)] == [True, False]
    assert [await works(db, new, hours * HOUR) for hours in (0.9, 1.1)] == [True, False]
    assert [await works(db, newest, days * DAY) for days in (29.9, 30.1)] == [True, False]


async def test_a_revoked_key_is_refused_for_good(admin: Admin, db: Connection) -> None:
    """Once is enough, and it cannot be rotated back to life; a whole key will do for its id, and is not repeated."""
    key = (await admin.json("key", "create", "acme", "ci"))["key"]

    said = await admin.done("key", "revoke", key)
    again = await admin.done("key", "revoke", key[3:15])
    refused = await admin.fault(1, "key", "rotate", key)

    assert not await works(db, key)
    assert "revoked_at  none -> 20" in said
    assert again == f"key {key[3:15]}: nothing to change\n"
    assert refused.startswith(f"Key {key[3:15]} cannot be rotated: it is revoked since 20")
    assert key[16:] not in said + again + refused
    assert (await admin.json("key", "show", key[3:15]))["state"] == "revoked"


async def test_keys_are_listed_with_their_state(admin: Admin, db: Connection) -> None:
    """The newest first; of one customer or all."""
    await customer(db, "beta", "free")
    await admin.done("key", "create", "acme", "first")
    await admin.done("key", "create", "beta", "second")
    await admin.done("key", "create", "acme", "third")
    await db.execute(
        "UPDATE api_keys SET created_at = now() - interval '2 h', expires_at = now() - interval '1 h' WHERE name = 'first'"
    )
    await admin.done("customer", "suspend", "beta")

    rows = await admin.json("key", "list")
    of_acme = await admin.json("key", "list", "--customer", "acme")
    cut = await admin.run("key", "list", "--limit", "1")

    assert [(row["name"], row["customer"], row["state"]) for row in rows] == [
        ("third", "acme", "live"),
        ("second", "beta", "suspended"),
        ("first", "acme", "expired"),
    ]
    assert [row["name"] for row in of_acme] == ["third", "first"]
    assert cut.stderr == "1 of 3 keys; --limit N shows more.\n"
    assert await admin.fault(1, "key", "rotate", rows[2]["id"]) != ""


@pytest.mark.parametrize(
    ("exit_code", "arguments", "said"),
    [
        (1, ["create", "nobody", "ci"], "There is no customer named nobody."),
        (2, ["create", "acme", ""], "name must have 1 to 200 characters, no control characters, not '' (what the key"),
        (
            2,
            ["create", "acme", "ci", "--expires-in", "soon"],
            "--expires-in: must be a number and s, m, h, d or w, such",
        ),
        (2, ["create", "acme", "ci", "--expires-in", "99999w"], "--expires-in: must be at most 36500d, got '99999w'"),
        (2, ["create", "acme", "ci", "--burst", "5"], "--burst: requires --requests-per-second"),
        (
            2,
            ["create", "acme", "ci", "--requests-per-second", "5", "--burst", "0"],
            "burst must be 1 to 10,000,000, not 0 (the key's own bucket size",
        ),
        (1, ["rotate", "abcdefghijkl"], "There is no key abcdefghijkl."),
        (2, ["rotate", "abcdefghijkl", "--grace", "0h"], "--grace: must be a number and s, m, h, d or w, such as 24h"),
        (1, ["revoke", "abcdefghijkl"], "There is no key abcdefghijkl."),
        (1, ["show", "tl_abcdefghijkl_secret"], "There is no key abcdefghijkl."),
        (1, ["list", "--customer", "nobody"], "There is no customer named nobody."),
    ],
)
async def test_a_fault_is_one_sentence(admin: Admin, exit_code: int, arguments: list[str], said: str) -> None:
    """And no key is issued."""
    line = await admin.fault(exit_code, "key", *arguments)

    assert line.startswith(said)
    assert "secret" not in line
    assert await admin.json("key", "list") == []
