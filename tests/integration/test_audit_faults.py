"""The auditor during faults of PostgreSQL and Redis: it reports them, and afterwards each request has one row."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.audit_fixtures import KEYS, auditor_for, count_requests, drained, new_ids, put_requests, running
from integration.ledger_fixtures import database_url, db, dsn, own_server, postgres_server
from ledger.audit.auditor import Auditor
from ledger.migration import upgrade_to_head
from scheduler.errors import RedisUnavailable
from scheduler.protocol.audit_outbox import Outbox
from scheduler.redis_client.connections import command_client
from tierlane_local.embedded.postgres import EmbeddedPostgres
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["database_url", "db", "own_server", "postgres_server"]

Connection = Any
STEP = 20
TERMINATE = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE application_name = 'tierlane-auditor' AND datname = current_database()"""
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tierlane-auditor' AND wait_event = $1"
DETACH_PARTITIONS = """
    DO $$ DECLARE part regclass; BEGIN
    FOR part IN SELECT inhrelid FROM pg_inherits WHERE inhparent = 'requests'::regclass LOOP
    EXECUTE format('ALTER TABLE requests DETACH PARTITION %s', part); END LOOP; END $$"""
# A slow commit that can be interrupted: deferred triggers run inside COMMIT.
SLOW_COMMIT = """
    CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(5); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION take_time();"""
FULL_DISK = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$;
    CREATE TRIGGER full_disk BEFORE INSERT ON requests FOR EACH ROW EXECUTE FUNCTION refuse();"""


@asynccontextmanager
async def connected(server: EmbeddedPostgres) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(server.dsn)
    try:
        yield connection
    finally:
        connection.terminate()


@asynccontextmanager
async def audited(server: EmbeddedPostgres, client: Redis, **policy: Any) -> AsyncIterator[Auditor]:
    """Run an auditor under a stream of requests. At the end each request must have exactly one row."""
    ids: list[str] = []
    stopping = asyncio.Event()

    async def stream() -> None:
        while not stopping.is_set():
            ids.extend(new := new_ids(STEP))
            await put_requests(client, new, step=STEP // 2)
            await asyncio.sleep(0.05)

    auditor = auditor_for(server.url, client, **policy)
    async with running(auditor):
        streaming = asyncio.create_task(stream())
        try:
            await eventually(lambda: auditor.rows_written > 0, "the first rows are written")
            yield auditor
        finally:
            stopping.set()
            await streaming
        await eventually(lambda: auditor.last_error is None, "no error is reported")
        await eventually(lambda: drained(client), "all is written")

    async with connected(server) as db:
        rows = await db.fetch("SELECT id FROM requests WHERE status = 'completed' AND tier IS NOT NULL")
    assert sorted(row[0] for row in rows) == sorted(ids)
    assert auditor.set_aside == 0


async def reported(auditor: Auditor, lag_s: float, error: str = "cannot be written") -> None:
    """Wait until the auditor reports this lag and this error; another error may be reported before it."""
    await eventually(lambda: auditor.lag() > lag_s and error in str(auditor.last_error), f"lag {lag_s} s and {error!r}")


async def waits_for(db: Connection, event: str) -> None:
    """Wait until the auditor's session waits for `event`."""
    await eventually(lambda: db.fetchval(WAITING, event), f"the auditor waits for {event}")


async def test_postgresql_down_for_three_seconds(client: Redis, own_server: EmbeddedPostgres) -> None:
    """While PostgreSQL is down, the lag and the outbox grow."""
    async with audited(own_server, client) as auditor:
        await own_server.stop()
        await reported(auditor, 1.0)
        before = await client.llen(KEYS.outbox)
        await reported(auditor, 3.0)
        assert await client.llen(KEYS.outbox) > before
        await own_server.start()


async def test_a_table_locked_for_five_seconds(client: Redis, own_server: EmbeddedPostgres) -> None:
    """Statements time out instead of hanging, and the lag grows; afterwards the backlog is written at once."""
    async with audited(own_server, client, statement_timeout_ms=1000) as auditor, connected(own_server) as db:
        async with db.transaction():
            await db.execute("LOCK TABLE requests IN ACCESS EXCLUSIVE MODE")
            written = auditor.rows_written
            await reported(auditor, 2.5, "statement timeout")
            await reported(auditor, 5.0)
            assert auditor.rows_written == written
        await eventually(lambda: auditor.lag() < 1, "the backlog is written", 5.0)


async def test_a_session_terminated_in_its_commit(client: Redis, own_server: EmbeddedPostgres) -> None:
    """If the session ends before its commit is durable, the entries are written again."""
    async with audited(own_server, client) as auditor, connected(own_server) as db:
        table = await db.fetchval("SELECT tableoid::regclass::text FROM requests LIMIT 1")
        await db.execute(SLOW_COMMIT.format(table=table))
        for _ in range(2):
            await waits_for(db, "PgSleep")
            await db.execute(TERMINATE)
            await eventually(lambda: not auditor.active, "the session is lost")
        await db.execute(f"DROP TRIGGER slow ON {table}")


async def test_a_commit_whose_reply_is_lost(client: Redis, tmp_path: Path) -> None:
    """If the session ends after its commit is durable, writing the entries again changes nothing."""
    replicated = ("-c", "fsync=off", "-c", "wal_level=replica", "-c", "max_wal_senders=1")
    server = EmbeddedPostgres(tmp_path, tmp_path / "socket", extra_args=replicated)
    await server.start()
    try:
        await upgrade_to_head(server.url)
        async with audited(server, client) as auditor, connected(server) as db:
            # A commit is durable here, and then waits for a standby that does not exist.
            await set_standbys(db, "nobody")
            await waits_for(db, "SyncRep")
            before = await db.fetchval("SELECT count(*) FROM requests")
            written = auditor.rows_written
            await db.execute(TERMINATE)
            is_durable = "SELECT count(*) > $1 FROM requests"
            await eventually(lambda: db.fetchval(is_durable, before), "the rows are durable")
            assert auditor.rows_written == written
            await set_standbys(db, "")
    finally:
        await server.stop()


async def set_standbys(db: Connection, names: str) -> None:
    await db.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    await db.execute("SELECT pg_reload_conf()")


async def test_postgresql_killed_repeatedly(client: Redis, own_server: EmbeddedPostgres) -> None:
    """After SIGKILL of the server committed rows exist, and the others are written again."""
    async with audited(own_server, client) as auditor:
        for _ in range(3):
            written = auditor.rows_written
            own_server.kill()
            await reported(auditor, 0.1)
            await own_server.start()
            await eventually(lambda written=written: auditor.rows_written > written, "it writes again")


async def test_a_full_disk(client: Redis, own_server: EmbeddedPostgres) -> None:
    """Entries wait while PostgreSQL cannot extend its files; no record is set aside."""
    async with audited(own_server, client) as auditor, connected(own_server) as db:
        await db.execute(FULL_DISK)
        await reported(auditor, 1.0, "No space left")
        await db.execute("DROP FUNCTION refuse CASCADE")


@pytest.mark.parametrize(
    ("change", "repair", "error"),
    [
        (DETACH_PARTITIONS, "ALTER TABLE requests ATTACH PARTITION requests_default DEFAULT", "partition"),
        ("ALTER TABLE requests RENAME TO x", "ALTER TABLE x RENAME TO requests", "tierlane migrate"),
        *(
            (
                f"ALTER TABLE requests ALTER attempts TYPE {other}",
                "ALTER TABLE requests ALTER attempts TYPE integer",
                "cannot be written",
            )
            for other in ("smallint", "bigint")
        ),
    ],
    ids=["no partition", "no table", "smaller column", "larger column"],
)
async def test_a_schema_that_differs(
    client: Redis, database_url: str, db: Connection, change: str, repair: str, error: str
) -> None:
    """Entries wait, no record is set aside, and writing continues after the repair."""
    await db.execute(change)
    await put_requests(client, new_ids(10))
    auditor = auditor_for(database_url, client)
    auditor.maintenance._partitions_due = 1e18  # It creates none.
    async with running(auditor):
        assert error in (await eventually(lambda: auditor.last_error, "an error is reported"))
        await db.execute(repair)
        await eventually(lambda: drained(client), "all is written")

    assert await count_requests(db) == {"completed": 10}
    assert auditor.set_aside == 0


async def test_terminated_sessions_lose_and_repeat_nothing(client: Redis, database_url: str, db: Connection) -> None:
    """Sessions are terminated repeatedly while ten thousand requests are written, with a second auditor on standby."""
    kills = 0
    first, second = (auditor_for(database_url, client, name, take_limit=10) for name in ("a1", "a2"))
    async with running(first), running(second):
        await put_requests(client, new_ids(10_000))
        while not await drained(client):
            kills += int(await db.fetchval(TERMINATE))
            with contextlib.suppress(AssertionError):
                await eventually(lambda: drained(client), "all is written before the next kill", 0.2)

    assert kills > 0
    assert await count_requests(db) == {"completed": 10_000}
    assert first.set_aside == second.set_aside == 0


async def test_an_auditor_without_its_lock_cannot_write(client: Redis, database_url: str, db: Connection) -> None:
    """The lock belongs to the session that writes: after another session got it, nothing is written."""
    auditor = auditor_for(database_url, client)
    waiting_locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    async with running(auditor):
        await eventually(lambda: auditor.active, "it is active")
        rival = await asyncpg.connect(dsn(database_url))
        waiting = asyncio.create_task(rival.execute("SELECT pg_advisory_lock(7436002, hashtext('default'))"))
        await eventually(lambda: db.fetchval(waiting_locks), "the rival waits for the lock")
        await db.fetchval(TERMINATE)
        await waiting
        await put_requests(client, new_ids(1))
        await eventually(lambda: not auditor.active, "it is not active")
        assert await count_requests(db) == {}
        await rival.close()
        await eventually(lambda: drained(client), "it is active again and has written")

    assert await count_requests(db) == {"completed": 1}


async def test_a_failed_maintenance_task(client: Redis, database_url: str, db: Connection) -> None:
    """It is reported, also after other tasks have succeeded, and rows are written."""
    await db.execute("DROP FUNCTION ensure_request_partitions")
    auditor = auditor_for(database_url, client)
    async with running(auditor):
        await put_requests(client, new_ids(10))
        await eventually(lambda: drained(client), "all is written")
        error = await eventually(lambda: auditor.last_error, "the error is reported")
        assert "cannot make partitions" in error

    assert auditor.last_error == error
    assert await count_requests(db) == {"completed": 10}


class FailsToDrop(Outbox):
    """Redis is lost between commit and drop, three times."""

    failures = 3

    async def drop(self, count: int, oldest: str, bad: Sequence[bytes] = ()) -> None:
        if self.failures:
            self.failures -= 1
            raise RedisUnavailable("Redis did not answer: the connection was closed between commit and drop")
        await super().drop(count, oldest, bad)


async def test_redis_lost_between_commit_and_drop(client: Redis, database_url: str, db: Connection) -> None:
    """Committed entries are written again without effect, and dropped."""
    await put_requests(client, new_ids(100))
    outbox = FailsToDrop(client, KEYS, "a1")
    auditor = auditor_for(database_url, client, outbox=outbox)
    async with running(auditor):
        await eventually(lambda: drained(client), "all is dropped")

    assert outbox.failures == 0
    assert await count_requests(db) == {"completed": 100}
    assert auditor.last_error is None


async def test_redis_not_available(tmp_path: Path, database_url: str, db: Connection) -> None:
    """The auditor keeps its lock and reports the problem, and continues afterwards."""
    server = EmbeddedRedis(tmp_path, tmp_path / "socket", ephemeral=True)
    await server.start()
    client = command_client(server.url)
    auditor = auditor_for(database_url, client)
    async with running(auditor):
        await eventually(lambda: auditor.active, "it is active")
        await server.stop()
        assert "Redis" in await eventually(lambda: auditor.last_error, "the error is reported")
        assert auditor.active
        await server.start()
        await put_requests(client, new_ids(10))
        await eventually(lambda: drained(client), "all is written")

    await client.aclose()
    await server.stop()
    assert await count_requests(db) == {"completed": 10}
