"""The catalog: snapshots that follow recorded changes, and the follower of PostgreSQL, also during its faults."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from eventually import eventually
from gateway.operations.health.connection_probe import ConnectionProbe
from integration.ledger_fixtures import database_url, db, fill_catalog, own_server, postgres_server
from ledger.catalog.follower import POLL_SLACK_S, Catalog
from ratelimit.limits import value_of
from scheduler.errors import ErrorCode, RequestError
from tierlane_local.embedded.postgres import EmbeddedPostgres

__all__ = ["database_url", "db", "own_server", "postgres_server"]

Connection = Any
INVALID, UNAVAILABLE = ErrorCode.INVALID_API_KEY, ErrorCode.CATALOG_UNAVAILABLE
TERMINATE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name = 'tierlane-catalog' AND datname = current_database()"
)
REVOKE = "UPDATE api_keys SET revoked_at = now() WHERE id = $1"
MANY = 100_000
LONGEST_STEP_MS = 30  # A few milliseconds are usual; the rest is for a machine with other work.


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
