"""A picture that is kept up to date by what changed equals one that is read anew, whatever was changed and by how many."""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import asyncpg
import pytest

from integration.ledger_fixtures import database_url, db, dsn, postgres_server
from ledger.catalog.changes import MAX_CHANGES, load_changes
from ledger.catalog.loader import LoadedCatalog, load, load_whole
from ledger.catalog.snapshot import Snapshot
from ledger.dead_letters import LetterSelection, note
from ratelimit.limits import value_of

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
SOME_CUSTOMER = "(SELECT id FROM customers ORDER BY md5(id::text || '{n}') LIMIT 1)"
SOME_KEY = "(SELECT id FROM api_keys ORDER BY md5(id || '{n}') LIMIT 1)"
SOME_QUOTA = "(SELECT id FROM quotas ORDER BY md5(id::text || '{n}') LIMIT 1)"
NEW_KEY = "INSERT INTO api_keys (id, customer_id, name, secret_hash) SELECT substr(md5('{n}'), 1, 12), {c}, 'k', sha256('{n}')"
# What is often changed, and then what makes everything be read.
OFTEN = (
    "INSERT INTO customers (name, tier) SELECT 'c{n}-' || g, '{tier}' FROM generate_series(1, {few}) AS g",
    "UPDATE customers SET tier = '{tier}' WHERE id = {c}",
    "UPDATE customers SET status = 'suspended', burst = {few} WHERE id = {c}",
    "UPDATE customers SET burst = NULL, tokens_per_minute = {n} WHERE name LIKE '%{few}'",
    "UPDATE customers SET callback_hosts = NULLIF('h{few}.example.org', 'h1.example.org') WHERE id = {c}",
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
    "UPDATE quotas SET customer_id = {c} WHERE id = {q} AND customer_id IS NOT NULL",
    "DELETE FROM quotas WHERE id = {q}",
    "INSERT INTO models (name) VALUES ('m{few}') ON CONFLICT (name) DO UPDATE SET max_wait_ms = {few}",
    "DELETE FROM models WHERE name = 'm{few}'",
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
REFUSED = (asyncpg.IntegrityConstraintViolationError, asyncpg.TransactionRollbackError)


def statement_of(draw: random.Random) -> str:
    n = draw.randrange(1, 10_000_000)
    parts = {
        "n": n,
        "few": draw.randrange(1, 10),
        "tier": draw.choice(("enterprise", "paid", "free")),
        "c": SOME_CUSTOMER.format(n=n),
        "k": SOME_KEY.format(n=n),
        "q": SOME_QUOTA.format(n=n),
    }
    return draw.choice(OFTEN if draw.random() < 0.97 else SELDOM).format(**parts)


async def write(connection: Connection, draw: random.Random) -> None:
    """One transaction of some statements; one that is refused or in another's way changes nothing."""
    with suppress(*REFUSED):
        async with connection.transaction():
            for _ in range(draw.randrange(1, 4)):
                await connection.execute(statement_of(draw))
                await asyncio.sleep(0)
            if draw.random() < 0.1:
                raise asyncpg.TransactionRollbackError


def content(snapshot: Snapshot) -> dict[str, Any]:
    """In a form that does not depend on order."""
    return {
        "version": snapshot.version,
        "tiers": snapshot.tiers,
        "customers": dict(snapshot.customers),
        "keys": dict(snapshot.keys),
        "models": dict(snapshot.models),
        "cordoned": snapshot.cordoned,
        "quotas": sorted(snapshot.quotas, key=repr),
    }


class Follower:
    """Keeps a picture as the catalog does, and counts how."""

    def __init__(self, connection: Connection, picture: LoadedCatalog) -> None:
        self._connection = connection
        self.picture = picture
        self.ways: Counter[str] = Counter()

    async def look(self) -> None:
        changed = await load_changes(self._connection, self.picture)
        self.ways["whole" if changed is None else "changes"] += 1
        self.picture = changed or await load_whole(self._connection, self.picture.snapshot)

    async def look_until(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await self.look()


@pytest.mark.parametrize("seed", range(3))
async def test_following_changes_ends_where_reading_everything_does(
    database_url: str, db: Connection, seed: int
) -> None:
    """Three writers at once, in transactions of several statements, some rolled back; looked at while they write."""
    draw = random.Random(seed)
    writers = [await asyncpg.connect(dsn(database_url), server_settings={"deadlock_timeout": "10ms"}) for _ in range(3)]
    watching = await asyncpg.connect(dsn(database_url))
    await db.execute("INSERT INTO customers (name, tier) SELECT 'c' || n, 'paid' FROM generate_series(1, 9) AS n")
    follower = Follower(watching, await load_whole(watching))
    for _ in range(40):
        over = asyncio.Event()
        looking = asyncio.create_task(follower.look_until(over))
        await asyncio.gather(*(write(writer, random.Random(draw.random())) for writer in writers))
        over.set()
        await looking
        await follower.look()

        assert content(follower.picture.snapshot) == content(await load(db))
    for connection in (*writers, watching):
        await connection.close()

    assert follower.ways["changes"] > follower.ways["whole"]


async def follow(db: Connection, sql: str, *args: Any) -> tuple[Snapshot, Snapshot | None]:
    """The pictures before and after a statement; None where the change cannot be followed."""
    before = await load_whole(db)
    await db.execute(sql, *args)
    after = await load_changes(db, before)
    return before.snapshot, None if after is None else after.snapshot


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
async def test_what_rows_cannot_tell_or_all_customers_feel_is_read_whole(db: Connection, sql: str) -> None:
    """Slower, and never wrong."""
    _, after = await follow(db, sql)

    assert after is None


async def test_what_was_deleted_from_the_record_before_the_last_look_is_of_no_matter(db: Connection) -> None:
    """Old changes are cleared away; the next ones are followed all the same."""
    await db.execute("DELETE FROM config_changes")
    _, after = await follow(db, "INSERT INTO models (name) VALUES ('tiny')")

    assert after is not None
    assert list(after.models) == ["tiny"]


async def test_changes_that_came_with_a_dump_are_not_read_for_ever(db: Connection) -> None:
    """Their transactions' numbers are another server's, and may be ahead of ours."""
    await db.execute(
        "INSERT INTO config_changes (changed_by, table_name, row_key, new, xact) "
        f"SELECT 'x', 'models', n, '{{}}', 10 ^ 15 FROM generate_series(0, {MAX_CHANGES}) AS n"
    )
    _, after = await follow(db, "INSERT INTO models (name) VALUES ('tiny')")

    assert after is not None
    assert list(after.models) == ["tiny"]


async def test_only_what_changed_is_new(db: Connection) -> None:
    """All else is the very same object, so that a change costs what it is, not what there is."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid'), ('other', 'free')")
    mine, others = [await db.fetchval("SELECT issue_api_key($1, 'ci')", name) for name in ("acme", "other")]
    before, after = await follow(db, "UPDATE api_keys SET revoked_at = now() WHERE id = $1", mine[3:15])

    assert after.keys[mine[3:15]].revoked
    assert after.keys[others[3:15]] is before.keys[others[3:15]]
    assert after.customers == before.customers
    assert after.version == before.version + 1
    assert not before.keys[mine[3:15]].revoked


async def test_what_of_a_tier_no_customer_inherits_is_followed(db: Connection) -> None:
    """Shedding and the trial of a tier are obeyed at once, however many customers there are."""
    before, after = await follow(db, "UPDATE tiers SET shadow = true, shed_depth = 7 WHERE name = 'free'")

    assert after is not None
    assert (after.tier("free").shadow, after.tier("free").shed_depth) == (True, 7)
    assert not before.tier("free").shadow


async def test_a_change_that_commits_late_is_not_missed(database_url: str, db: Connection) -> None:
    """Its row got its number first and became visible last: in between a later one was seen."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    late = await asyncpg.connect(dsn(database_url))
    transaction = late.transaction()
    await transaction.start()
    await late.execute("SELECT pg_current_xact_id()")  # It is the older transaction.
    picture = await load_whole(db)
    await db.execute("INSERT INTO models (name) VALUES ('first')")
    picture = await load_changes(db, picture)
    await late.execute("UPDATE customers SET burst = 3")
    await db.execute("UPDATE api_keys SET last_used_at = now()")
    picture = await load_changes(db, picture)
    await transaction.commit()
    picture = await load_changes(db, picture)
    await late.close()

    assert [value_of(customer.limits, "burst") for customer in picture.snapshot.customers.values()] == [3]
    assert content(picture.snapshot) == content(await load(db))


async def test_what_is_done_to_dead_letters_is_no_change_of_the_catalog(db: Connection) -> None:
    """It stands in the same record, and makes nobody read everything anew."""
    before = await load_whole(db)
    await note(db, LetterSelection(None, None, None, 7).words(), {"count": 1}, None)
    await db.execute("INSERT INTO models (name) VALUES ('other')")

    after = await load_changes(db, before)

    assert after is not None
    assert after.snapshot == await load(db)
    assert await db.fetchval("SELECT row_key FROM config_changes WHERE table_name = 'dead_letters'") == "all up to 7"
