"""The catalog follows PostgreSQL within a second, and stays in use while PostgreSQL is not available."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest

from eventually import eventually
from integration.ledger_fixtures import database_url, db, dsn, own_server, postgres_server
from ledger.catalog.follower import POLL_SLACK_S, Catalog
from ledger.catalog.loader import CHANNEL
from ledger.catalog.snapshot import Identity
from ratelimit.limits import value_of
from scheduler.errors import ErrorCode, RequestError
from tierlane.embedded.postgres import EmbeddedPostgres

__all__ = ["database_url", "db", "own_server", "postgres_server"]

Connection = Any
KILL_CATALOG = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tierlane-catalog' AND datname = current_database()"


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
    try:
        catalog.identify(key, time.time())
    except RequestError as error:
        return error.code
    return None


def who(catalog: Catalog, key: str) -> Identity:
    return catalog.identify(key, time.time())


async def issue(db: Connection) -> str:
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid') ON CONFLICT DO NOTHING")
    key: str = await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    return key


async def changed_within(catalog: Catalog, db: Connection, value: float, limit_s: float) -> None:
    """Set the burst of the tier free and see it arrive."""
    await db.execute("UPDATE tiers SET burst = $1 WHERE name = 'free'", value)
    await eventually(lambda: burst(catalog) == value, f"burst {value} arrives", limit_s)


async def test_without_notify_the_poll_brings_it(catalog: Catalog, db: Connection) -> None:
    """A change whose notification is lost arrives with the poll."""
    await db.execute(
        "CREATE OR REPLACE FUNCTION bump_catalog_version() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN UPDATE catalog_version SET version = version + 1; RETURN NULL; END $$"
    )

    await changed_within(catalog, db, 19, 2.0)


CHANGES: dict[str, tuple[str, Callable[[Catalog, str], bool]]] = {
    "tier": (
        "UPDATE tiers SET burst = 17 WHERE name = 'paid'",
        lambda c, key: value_of(who(c, key).limits, "burst") == 17,
    ),
    "customer": (
        "UPDATE customers SET max_concurrency = 3",
        lambda c, key: value_of(who(c, key).limits, "max_concurrency") == 3,
    ),
    "customer suspended": (
        "UPDATE customers SET status = 'suspended'",
        lambda c, key: code_of(c, key) is ErrorCode.ACCOUNT_SUSPENDED,
    ),
    "customer moved to another tier": (
        "UPDATE customers SET tier = 'enterprise'",
        lambda c, key: who(c, key).tier == "enterprise",
    ),
    "customer deleted": ("DELETE FROM customers", lambda c, _: not c.snapshot.keys),
    "key": ("UPDATE api_keys SET requests_per_second = 2, burst = 3", lambda c, key: who(c, key).key_rate == 2),
    "key revoked": (
        "UPDATE api_keys SET revoked_at = now()",
        lambda c, key: code_of(c, key) is ErrorCode.INVALID_API_KEY,
    ),
    "quota": (
        "INSERT INTO quotas (customer_id, quota) SELECT id, '10/day' FROM customers",
        lambda c, key: who(c, key).quotas == (("1day", 10),),
    ),
    "quota of a tier": (
        "INSERT INTO quotas (tier, quota) VALUES ('paid', '9 per 2 hours')",
        lambda c, key: who(c, key).quotas == (("2hour", 9),),
    ),
    "model": ("INSERT INTO models (name) VALUES ('tiny')", lambda c, _: "tiny" in c.snapshot.models),
}


@pytest.mark.parametrize("row", CHANGES)
async def test_a_change_is_obeyed_within_a_second(database_url: str, db: Connection, row: str) -> None:
    """Each kind of change arrives by notification within a second."""
    key = await issue(db)
    catalog = Catalog(database_url, poll_s=60)
    await catalog.start()
    sql, is_obeyed = CHANGES[row]
    assert not is_obeyed(catalog, key)

    await db.execute(sql)
    await eventually(lambda: is_obeyed(catalog, key), f"the {row} is obeyed", 1.0)
    await catalog.stop()


async def test_a_killed_connection_is_made_again(catalog: Catalog, db: Connection) -> None:
    """A change while the connection is lost arrives after the reconnection."""
    assert await db.fetchval(KILL_CATALOG)

    await changed_within(catalog, db, 20, 2.0)
    await eventually(lambda: catalog.problem is None, "the problem is over")


async def test_another_change_of_the_same_number_is_not_taken_for_ours(catalog: Catalog, db: Connection) -> None:
    """After a failover another change with the same version is detected by its time."""
    await db.execute("ALTER TABLE tiers DISABLE TRIGGER USER")
    await db.execute("UPDATE tiers SET burst = 23 WHERE name = 'free'")
    await db.execute("UPDATE catalog_version SET changed_at = clock_timestamp()")
    assert await db.fetchval(KILL_CATALOG)

    await eventually(lambda: burst(catalog) == 23, "the other server's picture arrives", 2.0)


async def test_changes_are_followed_by_rows_also_after_a_reconnection(
    catalog: Catalog, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reconnection changes are read row by row."""
    key = await issue(db)
    await eventually(lambda: code_of(catalog, key) is None, "the key is known")
    assert await db.fetchval(KILL_CATALOG)
    await eventually(lambda: catalog.problem, "the connection is seen to be gone")
    await eventually(lambda: catalog.problem is None, "it is there again")

    def too_much(*_: Any) -> None:
        raise AssertionError("everything was read again")

    monkeypatch.setattr("ledger.catalog.follower.load_whole", too_much)
    await db.execute("UPDATE api_keys SET revoked_at = now()")
    await eventually(lambda: code_of(catalog, key) is ErrorCode.INVALID_API_KEY, "it is revoked", 1.0)


async def test_a_bad_row_keeps_the_last_good_snapshot(catalog: Catalog, db: Connection) -> None:
    """An invalid row keeps the last valid snapshot, and the problem names the row."""
    key = await issue(db)
    await eventually(lambda: code_of(catalog, key) is None, "the key is known")
    await db.execute("ALTER TABLE tiers DROP CONSTRAINT ck_tiers_burst")
    await db.execute("UPDATE tiers SET burst = 'NaN' WHERE name = 'free'")

    problem = await eventually(lambda: catalog.problem, "the problem is told", 2.0)

    assert "tiers row 'free' has a burst of nan" in problem
    assert burst(catalog) == 200
    assert code_of(catalog, key) is None
    await changed_within(catalog, db, 21, 2.0)
    assert catalog.problem is None


async def test_a_new_key_under_a_bad_row_is_unavailable_not_invalid(database_url: str, db: Connection) -> None:
    """A new key under an invalid row gets `catalog_unavailable`."""
    catalog = Catalog(database_url, poll_s=0.05)
    await catalog.start()
    await db.execute("ALTER TABLE tiers DROP CONSTRAINT ck_tiers_burst")
    await db.execute("UPDATE tiers SET burst = 'NaN' WHERE name = 'free'")
    key = await issue(db)

    await eventually(lambda: code_of(catalog, key) is ErrorCode.CATALOG_UNAVAILABLE, "it answers unavailable")
    await catalog.stop()


async def test_an_unmigrated_database_is_a_problem_with_advice(database_url: str, db: Connection) -> None:
    """A database without tables is reported with the command to run, and read after it."""
    await db.execute("ALTER TABLE catalog_version RENAME TO elsewhere")
    catalog = Catalog(database_url)
    await catalog.start()

    assert catalog.snapshot is None
    assert "tierlane migrate" in catalog.problem
    await db.execute("ALTER TABLE elsewhere RENAME TO catalog_version")
    await eventually(lambda: catalog.snapshot, "the catalog is read", 3.0)
    await catalog.stop()


async def test_postgres_away_keeps_known_keys_and_doubts_unknown_ones(own_server: EmbeddedPostgres) -> None:
    """While PostgreSQL is not available, known keys are accepted for a limited time and unknown ones are unavailable."""
    now = [0.0]
    catalog = Catalog(own_server.url, clock=lambda: now[0] + time.monotonic())
    await own_server.stop()
    await catalog.start()  # Does not fail.
    assert catalog.snapshot is None
    assert "does not answer" in catalog.problem
    assert code_of(catalog, "tl_nonsense") is ErrorCode.INVALID_API_KEY

    await own_server.start()
    db = await asyncpg.connect(own_server.dsn)
    known, unknown = await issue(db), await issue(db)
    assert await db.execute("DELETE FROM api_keys WHERE id = $1", unknown[3:15]) == "DELETE 1"
    await eventually(lambda: catalog.snapshot and code_of(catalog, known) is None, "the key is known", 5.0)
    assert code_of(catalog, unknown) is ErrorCode.INVALID_API_KEY

    await own_server.stop()
    db.terminate()
    await eventually(lambda: catalog.problem, "the problem is seen", 3.0)
    now[0] += 10
    assert code_of(catalog, known) is None
    assert code_of(catalog, unknown) is ErrorCode.CATALOG_UNAVAILABLE
    assert 10 < catalog.age_s() < 20
    now[0] += 900
    assert code_of(catalog, known) is ErrorCode.CATALOG_UNAVAILABLE

    await own_server.start()
    await eventually(lambda: code_of(catalog, known) is None and catalog.fresh, "it is good again", 3.0)
    assert catalog.problem is None
    await catalog.stop()


async def wrong_key(db: Connection) -> str:
    """A key of the right form that is not in the table."""
    key = await issue(db)
    await db.execute("DELETE FROM api_keys WHERE id = $1", key[3:15])
    return key


async def test_an_unknown_key_is_doubted_as_soon_as_postgres_is_gone(own_server: EmbeddedPostgres) -> None:
    """Unknown keys get a 503 as soon as the connection closes."""
    db = await asyncpg.connect(own_server.dsn)
    known, unknown = await issue(db), await wrong_key(db)
    await db.close()
    catalog = Catalog(own_server.url)
    await catalog.start()
    assert code_of(catalog, unknown) is ErrorCode.INVALID_API_KEY

    own_server.kill()
    await eventually(lambda: code_of(catalog, unknown) is ErrorCode.CATALOG_UNAVAILABLE, "it is doubted", 0.5)
    assert "closed" in str(catalog.problem)
    assert code_of(catalog, known) is None
    assert code_of(catalog, "tl_nonsense") is ErrorCode.INVALID_API_KEY

    await own_server.start()
    await eventually(lambda: code_of(catalog, unknown) is ErrorCode.INVALID_API_KEY, "it is known to be wrong", 5.0)
    await catalog.stop()
    assert catalog.problem is None


async def test_an_unknown_key_is_doubted_when_postgres_hangs(database_url: str, db: Connection) -> None:
    """Unknown keys get a 503 once a poll is overdue."""
    known, unknown = await issue(db), await wrong_key(db)
    catalog = Catalog(database_url, poll_s=0.2)
    await catalog.start()
    backend = await db.fetchval("SELECT pid FROM pg_stat_activity WHERE application_name = 'tierlane-catalog'")
    assert code_of(catalog, unknown) is ErrorCode.INVALID_API_KEY
    os.kill(backend, signal.SIGSTOP)
    try:
        await eventually(
            lambda: code_of(catalog, unknown) is ErrorCode.CATALOG_UNAVAILABLE, "it is doubted", 0.4 + 2 * POLL_SLACK_S
        )
        assert code_of(catalog, known) is None
    finally:
        os.kill(backend, signal.SIGCONT)

    await eventually(lambda: code_of(catalog, unknown) is ErrorCode.INVALID_API_KEY, "it is known to be wrong", 5.0)
    await catalog.stop()


async def test_an_unknown_key_is_not_doubted_between_polls(database_url: str, db: Connection) -> None:
    """An unknown key is always invalid while PostgreSQL responds to polls."""
    unknown = await wrong_key(db)
    catalog = Catalog(database_url, poll_s=0.3)
    await catalog.start()
    seen = set()
    until = time.monotonic() + 1.0

    def is_over() -> bool:
        seen.add(code_of(catalog, unknown))
        return time.monotonic() > until

    await eventually(is_over, "a second passes")
    await catalog.stop()

    assert seen == {ErrorCode.INVALID_API_KEY}


async def test_a_locked_table_does_not_hang_the_catalog(database_url: str, db: Connection) -> None:
    """A poll that times out is reported and retried."""
    catalog = Catalog(database_url, timeout_s=0.2, poll_s=0.1)
    await catalog.start()
    async with db.transaction():
        await db.execute("LOCK TABLE catalog_version IN ACCESS EXCLUSIVE MODE")
        await eventually(lambda: catalog.problem, "the problem is seen", 3.0)
        assert catalog.snapshot is not None

    await eventually(lambda: catalog.problem is None, "it goes on", 5.0)
    await catalog.stop()


async def test_many_changes_at_once_end_with_the_last(catalog: Catalog, db: Connection) -> None:
    """After many changes the last value arrives."""
    for value in range(100, 300):
        await db.execute("UPDATE tiers SET burst = $1 WHERE name = 'free'", float(value))

    await eventually(lambda: burst(catalog) == 299, "the last value arrives", 2.0)


async def test_stop_leaves_no_connection(database_url: str, db: Connection) -> None:
    """Start and stop can be called twice, and no connection is left."""
    catalog = Catalog(database_url)
    await asyncio.gather(catalog.start(), catalog.start())
    mine = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ 'catalog'"
    assert await db.fetchval(mine) == 1

    await catalog.stop()
    await catalog.stop()

    async def none_left() -> bool:
        return await db.fetchval(mine) == 0

    await eventually(none_left, "the connection is closed")
    assert catalog.snapshot is not None


async def test_notifications_carry_the_version(database_url: str, db: Connection) -> None:
    """A notification contains the version."""
    heard: list[str] = []
    listener = await asyncpg.connect(dsn(database_url))
    await listener.add_listener(CHANNEL, lambda *event: heard.append(event[3]))
    await db.execute("UPDATE tiers SET burst = 5")

    await eventually(lambda: heard, "the notification")
    await listener.close()
    assert heard == [str(await db.fetchval("SELECT version FROM catalog_version"))]
