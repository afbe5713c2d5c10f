"""Snapshots that follow recorded changes equal those that are read whole."""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import asyncpg
import pytest

from integration.ledger_fixtures import database_url, db, dsn, postgres_server
from ledger.catalog.changes import MAX_CHANGES, load_changes
from ledger.catalog.loader import load, load_whole
from ledger.catalog.snapshot import Snapshot
from ratelimit.limits import value_of

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
SOME_CUSTOMER = "(SELECT id FROM customers ORDER BY md5(id::text || '{n}') LIMIT 1)"
SOME_KEY = "(SELECT id FROM api_keys ORDER BY md5(id || '{n}') LIMIT 1)"
SOME_QUOTA = "(SELECT id FROM quotas ORDER BY md5(id::text || '{n}') LIMIT 1)"
NEW_KEY = "INSERT INTO api_keys (id, customer_id, name, secret_hash) SELECT substr(md5('{n}'), 1, 12), {c}, 'k', sha256('{n}')"
# Changes that are followed by rows, and changes for which everything is read again.
OFTEN = (
    "INSERT INTO customers (name, tier) SELECT 'c{n}-' || g, '{tier}' FROM generate_series(1, {few}) AS g",
    "UPDATE customers SET tier = '{tier}' WHERE id = {c}",
    "UPDATE customers SET status = 'suspended', burst = {few} WHERE id = {c}",
    "UPDATE customers SET burst = NULL, tokens_per_minute = {n} WHERE name LIKE '%{few}'",
    "UPDATE customers SET callback_hosts = NULLIF('h{few}.example.org', 'h1.example.org') WHERE id = {c}",
    "UPDATE customers SET models = NULLIF(ARRAY['m1', 'm{few}'], ARRAY['m1', 'm1']) WHERE id = {c}",
    "UPDATE customers SET time_zone = NULLIF('Etc/GMT-{few}', 'Etc/GMT-1') WHERE id = {c}",
    "UPDATE customers SET alert_url = 'https://h{few}.example.org' WHERE id = {c}",
    "UPDATE quotas SET alert_shares = ARRAY[0.1 * {few}] WHERE id = {q}",
    "UPDATE api_keys SET weight = {few} WHERE id = {k}",
    "UPDATE api_keys SET models = NULLIF(ARRAY['m{few}', 'm1'], ARRAY['m1', 'm1']) WHERE id = {k}",
    "UPDATE customers SET name = 'renamed {n}' WHERE id = {c}",
    "UPDATE customers SET id = md5('{n}')::uuid WHERE id = {c} AND NOT EXISTS (SELECT FROM api_keys k WHERE k.customer_id = customers.id)",
    "DELETE FROM customers WHERE id = {c}",
    NEW_KEY,
    NEW_KEY + " UNION ALL SELECT substr(md5('b{n}'), 1, 12), {c}, 'k', sha256('b{n}')",
    "UPDATE api_keys SET revoked_at = now() WHERE id = {k}",
    "UPDATE api_keys SET requests_per_second = {few}, burst = {n}, expires_at = now() + interval '{n} s' WHERE id = {k}",
    "UPDATE api_keys SET customer_id = {c} WHERE id = {k}",
    "UPDATE api_keys SET id = substr(md5('u{n}'), 1, 12) WHERE id = {k}",
    "UPDATE api_keys SET last_used_at = now()",
    "DELETE FROM api_keys WHERE id = {k}",
    "INSERT INTO quotas (customer_id, quota) SELECT {c}, '{n}/day'",
    "INSERT INTO quotas (customer_id, quota) SELECT {c}, '{n}.5 gpu-s/day'",
    "UPDATE quotas SET customer_id = {c} WHERE id = {q} AND customer_id IS NOT NULL",
    "DELETE FROM quotas WHERE id = {q}",
    "INSERT INTO models (name) VALUES ('m{few}') ON CONFLICT (name) DO UPDATE SET max_wait_ms = {few}",
    "DELETE FROM models WHERE name = 'm{few}'",
    "INSERT INTO prices (model, usd_per_gpu_s) VALUES ('m{few}', {n})",
    "UPDATE prices SET usd_per_1000_tokens = {few} WHERE model = 'm{few}'",
    "INSERT INTO cordons (worker) VALUES ('w{few}') ON CONFLICT (worker) DO UPDATE SET reason = '{n}'",
    "DELETE FROM cordons WHERE worker = 'w{few}'",
    "UPDATE tiers SET paused = NOT paused WHERE name = '{tier}'",
    "UPDATE customers SET burst = burst",
    "UPDATE tiers SET shed_depth = {few}, shadow = NOT shadow WHERE name = '{tier}'",
)
SELDOM = (
    "INSERT INTO quotas (tier, quota) VALUES ('{tier}', '{n}/month')",
    "UPDATE quotas SET customer_id = {c}, tier = NULL WHERE id = {q}",
    "UPDATE tiers SET burst = {n} WHERE name = '{tier}'",
    "TRUNCATE quotas",
    "DELETE FROM config_changes",
    "SAVEPOINT s; DELETE FROM customers; ROLLBACK TO s",
)
# Restored from a dump: the transactions have the numbers of another server.
RESTORED = (
    "INSERT INTO config_changes (changed_by, table_name, row_key, new, xact) "
    f"SELECT 'x', 'models', n, '{{}}', 10 ^ 15 FROM generate_series(0, {MAX_CHANGES}) AS n"
)
DEAD_LETTERS = (
    "INSERT INTO config_changes (changed_by, table_name, row_key, old) VALUES ('x', 'dead_letters', 'all', '{}')"
)
REJECTED = (asyncpg.IntegrityConstraintViolationError, asyncpg.TransactionRollbackError)


def statement_of(draw: random.Random) -> str:
    n = draw.randrange(1, 10_000_000)
    parts = {"n": n, "few": draw.randrange(1, 10), "tier": draw.choice(("enterprise", "paid", "free"))}
    parts |= {"c": SOME_CUSTOMER.format(n=n), "k": SOME_KEY.format(n=n), "q": SOME_QUOTA.format(n=n)}
    return draw.choice(OFTEN if draw.random() < 0.97 else SELDOM).format(**parts)


async def write(connection: Connection, draw: random.Random) -> None:
    """One transaction of some statements; a rejected one changes nothing."""
    with suppress(*REJECTED):
        async with connection.transaction():
            for _ in range(draw.randrange(1, 4)):
                await connection.execute(statement_of(draw))
                await asyncio.sleep(0)
            if draw.random() < 0.1:
                raise asyncpg.TransactionRollbackError


def content(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot, independent of the order of rows."""
    values = {name: getattr(snapshot, name) for name in ("version", "tiers", "cordoned")}
    values |= {name: dict(getattr(snapshot, name)) for name in ("customers", "keys", "models")}
    return values | {"quotas": sorted(snapshot.quotas, key=repr)}


@pytest.mark.parametrize("seed", range(3))
async def test_following_changes_equals_reading_everything(database_url: str, db: Connection, seed: int) -> None:
    """Three concurrent writers, in transactions of several statements, some rolled back, while changes are read."""
    draw = random.Random(seed)
    writers = [await asyncpg.connect(dsn(database_url), server_settings={"deadlock_timeout": "10ms"}) for _ in range(3)]
    watching = await asyncpg.connect(dsn(database_url))
    await db.execute("INSERT INTO customers (name, tier) SELECT 'c' || n, 'paid' FROM generate_series(1, 9) AS n")
    loaded = await load_whole(watching)
    reads: Counter[str] = Counter()

    async def follow() -> None:
        nonlocal loaded
        changed = await load_changes(watching, loaded)
        reads["whole" if changed is None else "changes"] += 1
        loaded = changed or await load_whole(watching, loaded.snapshot)

    async def follow_until(over: asyncio.Event) -> None:
        while not over.is_set():
            await follow()

    for _ in range(40):
        over = asyncio.Event()
        following = asyncio.create_task(follow_until(over))
        await asyncio.gather(*(write(writer, random.Random(draw.random())) for writer in writers))
        over.set()
        await following
        await follow()

        assert content(loaded.snapshot) == content(await load(db))
    for connection in (*writers, watching):
        await connection.close()

    assert reads["changes"] > reads["whole"]


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE tiers SET burst = 7 WHERE name = 'free'",
        "INSERT INTO tiers SELECT 'gold', 9, 0, 1, 1, 1, NULL, 1, 1",
        "INSERT INTO quotas (tier, quota) VALUES ('paid', '10/day')",
        "TRUNCATE models",
        "TRUNCATE customers CASCADE",
        "DELETE FROM config_changes",
        "TRUNCATE config_changes",
        "UPDATE config_changes SET changed_by = 'nobody'",
        "UPDATE catalog_version SET version = 0",
        f"INSERT INTO models (name) SELECT 'm' || n FROM generate_series(0, {MAX_CHANGES}) AS n",
    ],
)
async def test_a_change_that_cannot_be_followed_is_read_whole(db: Connection, sql: str) -> None:
    """Changes of all customers, of the record itself, TRUNCATE, and very many changes."""
    before = await load_whole(db)
    await db.execute(sql)

    assert await load_changes(db, before) is None


@pytest.mark.parametrize(
    ("earlier", "sql"),
    [
        ("DELETE FROM config_changes", "INSERT INTO models (name) VALUES ('tiny')"),
        (RESTORED, "INSERT INTO models (name) VALUES ('tiny')"),
        ("SELECT 1", "UPDATE tiers SET shadow = true, shed_depth = 7 WHERE name = 'free'"),  # Not inherited.
        ("SELECT 1", f"{DEAD_LETTERS}; INSERT INTO models (name) VALUES ('tiny')"),
    ],
    ids=["deleted record", "restored dump", "shedding of a tier", "dead letters"],
)
async def test_a_change_is_followed(db: Connection, earlier: str, sql: str) -> None:
    """Earlier deletions, changes that no customer inherits, and records of dead letters cause no complete read."""
    await db.execute(earlier)
    before = await load_whole(db)
    await db.execute(sql)
    after = await load_changes(db, before)

    assert after is not None
    assert content(after.snapshot) == content(await load(db)) != content(before.snapshot)


@pytest.mark.parametrize(
    ("customer", "key", "effective"),
    [
        (None, None, None),
        (["a", "b"], None, ("a", "b")),
        (None, ["b", "a"], ("b", "a")),
        (["a", "b"], ["c", "b"], ("b",)),
        (["a"], ["b"], ()),
    ],
)
async def test_a_key_narrows_the_models_of_its_customer(
    db: Connection, customer: list[str] | None, key: list[str] | None, effective: tuple[str, ...] | None
) -> None:
    """It never has a model that its customer does not have."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    key_id = (await db.fetchval("SELECT issue_api_key('acme', 'ci')"))[3:15]
    before = await load_whole(db)
    await db.execute("UPDATE api_keys SET models = $1", key)
    await db.execute("UPDATE customers SET models = $1", customer)
    followed = await load_changes(db, before)

    assert followed is not None
    assert followed.snapshot.keys[key_id].identity.models == effective
    (row,) = followed.snapshot.customers.values()
    assert row.identity().models == (None if customer is None else tuple(customer))


async def test_quotas_of_a_key_are_followed(db: Connection) -> None:
    """They are its own beside those of its customer, named by the key with which they are counted."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    await db.execute("INSERT INTO quotas (customer_id, quota) SELECT id, '9/day' FROM customers")
    first, second = [(await db.fetchval("SELECT issue_api_key('acme', 'ci')"))[3:15] for _ in range(2)]
    before = await load_whole(db)
    assert before.snapshot.has_key_quotas is False
    await db.execute("UPDATE api_keys SET quotas = $1", ["100 usd/month", "5/day"])
    await db.execute("UPDATE api_keys SET quota_key = $1 WHERE id = $2", first, second)
    followed = await load_changes(db, before)

    assert followed is not None
    own = ((f"1month:usd@{first}", 100 * 10**9), (f"1day@{first}", 5))
    (customer,) = followed.snapshot.customers.values()
    assert customer.quotas == (("1day", 9),)
    assert [followed.snapshot.keys[key].identity.quotas for key in (first, second)] == [(("1day", 9), *own)] * 2
    assert followed.snapshot.quotas_of_keys() == (await load(db)).quotas_of_keys() == {customer.id: dict(own)}


@pytest.mark.parametrize("quotas", [[], ["9/day", None], [["9/day"]], ["9/day,8/week"], [""], ["9"], ["9/day"] * 11])
async def test_lists_of_quotas_are_checked(db: Connection, quotas: list[Any]) -> None:
    """Each one has the form of the table `quotas`."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    with pytest.raises(asyncpg.CheckViolationError) as error:
        await db.execute("UPDATE api_keys SET quotas = $1", quotas)

    assert error.value.constraint_name == "ck_api_keys_quotas"


@pytest.mark.parametrize("names", [[], ["a", None], [["a", "b"]], ["a b"], [""], ["a,b"], ["x"] * 101, ["a" * 129]])
@pytest.mark.parametrize("table", ["customers", "api_keys"])
async def test_lists_of_models_are_checked(db: Connection, table: str, names: list[Any]) -> None:
    """An empty list, which could be read as all models, a list of lists, and what cannot be a name."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    with pytest.raises(asyncpg.CheckViolationError) as error:
        await db.execute(f"UPDATE {table} SET models = $1", names)

    assert error.value.constraint_name == f"ck_{table}_models"


async def test_unchanged_rows_are_kept(db: Connection) -> None:
    """A change replaces only the objects of its rows, in a new snapshot."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid'), ('other', 'free')")
    mine, others = [(await db.fetchval("SELECT issue_api_key($1, 'ci')", name))[3:15] for name in ("acme", "other")]
    before = await load_whole(db)
    await db.execute("UPDATE api_keys SET revoked_at = now() WHERE id = $1", mine)
    after = await load_changes(db, before)

    assert after is not None
    assert (after.snapshot.keys[mine].revoked, before.snapshot.keys[mine].revoked) == (True, False)
    assert after.snapshot.keys[others] is before.snapshot.keys[others]


async def test_a_change_that_commits_late_is_not_missed(database_url: str, db: Connection) -> None:
    """Its row got its number before a change that was read, and became visible after it."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    late = await asyncpg.connect(dsn(database_url))
    transaction = late.transaction()
    await transaction.start()
    await late.execute("SELECT pg_current_xact_id()")  # It is the older transaction.
    loaded = await load_whole(db)
    await db.execute("INSERT INTO models (name) VALUES ('first')")
    loaded = await load_changes(db, loaded)
    await late.execute("UPDATE customers SET burst = 3")
    await db.execute("UPDATE api_keys SET last_used_at = now()")
    loaded = await load_changes(db, loaded)
    await transaction.commit()
    loaded = await load_changes(db, loaded)
    await late.close()

    assert [value_of(customer.limits, "burst") for customer in loaded.snapshot.customers.values()] == [3]
    assert content(loaded.snapshot) == content(await load(db))
