"""The catalog: snapshots that follow recorded changes, and the follower of PostgreSQL, also during its faults."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import asyncpg
import pytest

from eventually import eventually
from gateway.operations.health.connection_probe import ConnectionProbe
from integration.ledger_fixtures import database_url, db, dsn, fill_catalog, own_server, postgres_server
from ledger.catalog.changes import MAX_CHANGES, load_changes
from ledger.catalog.follower import POLL_SLACK_S, Catalog
from ledger.catalog.loader import load, load_whole
from ledger.catalog.snapshot import Snapshot
from ratelimit.limits import value_of
from scheduler.errors import ErrorCode, RequestError
from tierlane_local.embedded.postgres import EmbeddedPostgres

__all__ = ["database_url", "db", "own_server", "postgres_server"]

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
INVALID, UNAVAILABLE = ErrorCode.INVALID_API_KEY, ErrorCode.CATALOG_UNAVAILABLE
TERMINATE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name = 'tierlane-catalog' AND datname = current_database()"
)
REVOKE = "UPDATE api_keys SET revoked_at = now() WHERE id = $1"
MANY = 100_000
LONGEST_STEP_MS = 30  # A few milliseconds are usual; the rest is for a machine with other work.


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


@pytest.fixture
async def catalog(database_url: str) -> AsyncIterator[Catalog]:
    """A started catalog on the test's own database."""
    catalog = Catalog(database_url)
    await catalog.start()
    yield catalog
    await catalog.stop()


def burst(catalog: Catalog, tier: str = "free") -> float:
    return value_of(catalog.snapshot.tier(tier).limits, "burst") or 0.0 if catalog.snapshot else -1.0


def code_of(catalog: Catalog, key: str) -> ErrorCode | None:
    """The error for a request with this key, None if it is accepted."""
    try:
        catalog.identify(key, time.time())
    except RequestError as error:
        return error.code
    return None


async def issue(db: Connection) -> str:
    """A new key of the customer `acme`."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid') ON CONFLICT DO NOTHING")
    key: str = await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    return key


async def deleted_key(db: Connection) -> str:
    """A key of the right form that is not in the table."""
    key = await issue(db)
    await db.execute("DELETE FROM api_keys WHERE id = $1", key[3:15])
    return key


async def followed(catalog: Catalog, db: Connection, value: float, limit_s: float) -> None:
    """Change a tier, and wait until the catalog has the change."""
    await db.execute("UPDATE tiers SET burst = $1 WHERE name = 'free'", value)
    await eventually(lambda: burst(catalog) == value, f"burst {value} arrives", limit_s)


async def test_a_lost_notification_is_replaced_by_the_poll(catalog: Catalog, db: Connection) -> None:
    """A change without a notification arrives within two seconds."""
    await db.execute(
        "CREATE OR REPLACE FUNCTION bump_catalog_version() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN UPDATE catalog_version SET version = version + 1; RETURN NULL; END $$"
    )

    await followed(catalog, db, 19, 2.0)


async def test_many_changes_end_with_the_last(catalog: Catalog, db: Connection) -> None:
    """Notifications that arrive during a read are not lost."""
    for value in range(100, 299):
        await db.execute("UPDATE tiers SET burst = $1 WHERE name = 'free'", float(value))

    await followed(catalog, db, 299, 2.0)


async def test_a_lost_connection_is_reconnected(
    catalog: Catalog, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change during the loss arrives, and later changes are read row by row."""
    key = await issue(db)
    await eventually(lambda: code_of(catalog, key) is None, "the key is known")
    assert await db.fetchval(TERMINATE)
    await followed(catalog, db, 20, 2.0)
    await eventually(lambda: catalog.problem is None, "no problem is reported")

    def fails(*_: Any) -> None:
        raise AssertionError("everything was read again")

    monkeypatch.setattr("ledger.catalog.follower.load_whole", fails)
    await db.execute(REVOKE, key[3:15])
    await eventually(lambda: code_of(catalog, key) is INVALID, "it is revoked", 1.0)


async def test_a_failover_to_another_history_is_detected(catalog: Catalog, db: Connection) -> None:
    """A different change with the same version number has another time, so everything is read again."""
    await db.execute("ALTER TABLE tiers DISABLE TRIGGER USER")
    await db.execute("UPDATE tiers SET burst = 23 WHERE name = 'free'")
    await db.execute("UPDATE catalog_version SET changed_at = clock_timestamp()")
    assert await db.fetchval(TERMINATE)

    await eventually(lambda: burst(catalog) == 23, "the other server's state arrives", 2.0)


async def test_an_invalid_row_keeps_the_last_valid_snapshot(catalog: Catalog, db: Connection) -> None:
    """The problem names the row; meanwhile known keys are accepted, and new keys are unavailable, not invalid."""
    key = await issue(db)
    await eventually(lambda: code_of(catalog, key) is None, "the key is known")
    await db.execute("ALTER TABLE tiers DROP CONSTRAINT ck_tiers_burst")
    await db.execute("UPDATE tiers SET burst = 'NaN' WHERE name = 'free'")

    problem = await eventually(lambda: catalog.problem, "the problem is reported", 2.0)

    assert "tiers row 'free' has a burst of nan" in problem
    assert (burst(catalog), code_of(catalog, key)) == (200, None)
    new = await issue(db)
    await eventually(lambda: code_of(catalog, new) is UNAVAILABLE, "the new key is unavailable", 3.0)
    await followed(catalog, db, 21, 2.0)
    assert (catalog.problem, code_of(catalog, new)) == (None, None)


async def test_an_unmigrated_database_is_reported_with_the_command_to_run(database_url: str, db: Connection) -> None:
    """It is read after the migration."""
    await db.execute("ALTER TABLE catalog_version RENAME TO elsewhere")
    catalog = Catalog(database_url)
    await catalog.start()

    assert catalog.snapshot is None
    assert "tierlane migrate" in catalog.problem
    await db.execute("ALTER TABLE elsewhere RENAME TO catalog_version")
    await eventually(lambda: catalog.snapshot, "the catalog is read", 3.0)
    await catalog.stop()


async def test_postgresql_not_available(own_server: EmbeddedPostgres) -> None:
    """Known keys are accepted for a limited time; unknown ones are unavailable as soon as the connection closes.

    A start without PostgreSQL does not fail, and malformed keys are always invalid.
    """
    passed_s = 0.0
    catalog = Catalog(own_server.url, clock=lambda: passed_s + time.monotonic())
    await own_server.stop()
    await catalog.start()
    assert catalog.snapshot is None
    assert "is not responding" in catalog.problem
    assert code_of(catalog, "tl_nonsense") is INVALID

    await own_server.start()
    db = await asyncpg.connect(own_server.dsn)
    known, unknown = await issue(db), await deleted_key(db)
    await db.close()
    await eventually(lambda: catalog.snapshot and code_of(catalog, known) is None, "the key is known", 5.0)
    # The first read may be from between its creation and its deletion.
    await eventually(lambda: code_of(catalog, unknown) is INVALID, "the deleted key is unknown", 5.0)

    own_server.kill()
    await eventually(lambda: code_of(catalog, unknown) is UNAVAILABLE, "it is unavailable", 0.5)
    # The next attempt to connect may have replaced the message about the closed connection.
    assert str(catalog.problem).startswith("PostgreSQL at ")
    passed_s = 10
    assert code_of(catalog, known) is None
    assert code_of(catalog, "tl_nonsense") is INVALID
    assert 10 < catalog.age_s() < 20
    passed_s = 910
    assert code_of(catalog, known) is UNAVAILABLE

    await own_server.start()
    await eventually(lambda: code_of(catalog, known) is None and catalog.fresh, "it is fresh again", 5.0)
    assert code_of(catalog, unknown) is INVALID
    assert catalog.problem is None
    await catalog.stop()


async def test_postgresql_hangs(database_url: str, db: Connection) -> None:
    """An unknown key is invalid while polls are answered, and unavailable once a poll is overdue."""
    known, unknown = await issue(db), await deleted_key(db)
    catalog = Catalog(database_url, poll_s=0.2)
    await catalog.start()
    backend = await db.fetchval("SELECT pid FROM pg_stat_activity WHERE application_name = 'tierlane-catalog'")
    codes, until = set(), time.monotonic() + 1.0

    def is_over() -> bool:
        codes.add(code_of(catalog, unknown))
        return time.monotonic() > until

    await eventually(is_over, "several polls are over")
    assert codes == {INVALID}
    os.kill(backend, signal.SIGSTOP)
    try:
        limit_s = 0.4 + 2 * POLL_SLACK_S
        await eventually(lambda: code_of(catalog, unknown) is UNAVAILABLE, "it is unavailable", limit_s)
        assert code_of(catalog, known) is None
    finally:
        os.kill(backend, signal.SIGCONT)

    await eventually(lambda: code_of(catalog, unknown) is INVALID, "it is invalid again", 5.0)
    await catalog.stop()


async def test_a_locked_table_is_reported_and_retried(database_url: str, db: Connection) -> None:
    """A poll has a timeout."""
    catalog = Catalog(database_url, timeout_s=0.2, poll_s=0.1)
    await catalog.start()
    await eventually(lambda: catalog.snapshot is not None, "the catalog is read")
    async with db.transaction():
        await db.execute("LOCK TABLE catalog_version IN ACCESS EXCLUSIVE MODE")
        await eventually(lambda: catalog.problem, "the problem is reported", 3.0)
        assert catalog.snapshot is not None

    await eventually(lambda: catalog.problem is None, "it continues", 5.0)
    await catalog.stop()


async def test_stop_leaves_no_connection(database_url: str, db: Connection) -> None:
    """Start and stop can be called twice."""
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ 'catalog'"
    catalog = Catalog(database_url)
    await asyncio.gather(catalog.start(), catalog.start())
    assert await db.fetchval(count) == 1
    await catalog.stop()
    await catalog.stop()

    await eventually(lambda: db.fetchval(f"SELECT ({count}) = 0"), "the connection is closed")


@pytest.mark.timeout(120)
async def test_a_hundred_thousand_keys_are_followed_without_a_long_step(database_url: str, db: Connection) -> None:
    """A revocation arrives within a second, and neither loading nor following blocks the event loop."""
    first, second = await fill_catalog(db, MANY, known=2)
    catalog = Catalog(database_url, poll_s=60)
    longest_ms = 0.0

    async def watch() -> None:
        nonlocal longest_ms
        while True:
            before = time.thread_time()  # The CPU time of this thread only.
            await asyncio.sleep(0)
            longest_ms = max(longest_ms, (time.thread_time() - before) * 1000)

    watching = asyncio.create_task(watch())
    await catalog.start()
    assert len(catalog.snapshot.customers) == MANY
    assert code_of(catalog, first) is None
    await db.execute(REVOKE, first[3:15])
    await eventually(lambda: code_of(catalog, first) is INVALID, "the first key is revoked", 1.0)
    changed = burst(catalog, "paid") + 1
    await db.execute("UPDATE tiers SET burst = burst + 1")
    await eventually(lambda: burst(catalog, "paid") == changed, "all have the new limit", 5.0)
    await db.execute(REVOKE, second[3:15])
    await eventually(lambda: code_of(catalog, second) is INVALID, "the second key is revoked", 1.0)
    watching.cancel()
    await catalog.stop()

    assert {value_of(key.identity.limits, "burst") for key in catalog.snapshot.keys.values()} == {changed}
    assert longest_ms < LONGEST_STEP_MS


async def test_a_suspended_postmaster_is_reported_although_open_sessions_work(own_server: EmbeddedPostgres) -> None:
    """The catalog goes on over its session; the probe names the server, until a connection is accepted again."""
    catalog, probe = Catalog(own_server.url), ConnectionProbe(own_server.url)
    await catalog.start()
    await probe.probe()
    assert (probe.problem, catalog.problem) == (None, None)
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        await probe.probe()
        probed_at = time.monotonic()
        await eventually(
            lambda: catalog.age_s() < time.monotonic() - probed_at, "the session confirms the catalog", 5.0
        )
        assert catalog.problem is None
        assert probe.problem is not None
        assert "does not accept new connections: no response within 2 s." in probe.problem
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    await probe.probe()
    assert probe.problem is None
    await catalog.stop()
