"""Faults of PostgreSQL under a stream of requests: the auditor reports them, and each request has one row afterwards."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
from redis.asyncio import Redis

from eventually import eventually
from integration.auditor_bench import KEYS, auditor_for, drained, new_ids, put_requests, running
from integration.ledger_fixtures import own_server
from ledger.audit.auditor import Auditor
from ledger.migration import upgrade_to_head
from tierlane.embedded.postgres import EmbeddedPostgres

__all__ = ["own_server"]

Connection = Any
STEP = 20
FILE_LIMIT = 16 << 20  # The size of a segment of the write-ahead log, which must still be written.
TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tierlane-auditor'"
# A commit that takes its time, so that it can be cut: deferred triggers run inside COMMIT.
SLOW_COMMIT = """
    CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(5); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION take_time();"""
REFUSING_TRIGGER = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$;
    CREATE TRIGGER full_disk BEFORE INSERT ON requests FOR EACH ROW EXECUTE FUNCTION refuse();"""
FILLER = """
    INSERT INTO requests (id, created_at, status, model)
    SELECT 'req_' || lpad(to_hex(n), 32, '0'), now(), 'completed', repeat('x', 1900) FROM generate_series(1, 8300) n"""


class Stream:
    """A stream of requests, and their ids."""

    def __init__(self, client: Redis) -> None:
        self.ids: list[str] = []
        self._client = client
        self._ending = False

    def end(self) -> None:
        """Stop after the present requests were added."""
        self._ending = True

    async def run(self) -> None:
        while not self._ending:
            ids = new_ids(STEP)
            await put_requests(self._client, ids, step=STEP // 2)
            self.ids += ids
            await asyncio.sleep(0.05)


@asynccontextmanager
async def connected(server: EmbeddedPostgres) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(server.dsn)
    try:
        yield connection
    finally:
        connection.terminate()


@asynccontextmanager
async def audited(server: EmbeddedPostgres, client: Redis, **policy: Any) -> AsyncIterator[Auditor]:
    """A stream and an auditor. At the end each request has exactly one row."""
    stream = Stream(client)
    auditor = auditor_for(server.url, client, **policy)
    async with running(auditor):
        feeder = asyncio.create_task(stream.run())
        try:
            await eventually(lambda: auditor.rows_written > 0, "the first rows are written")
            yield auditor
        finally:
            stream.end()
            await feeder
        await eventually(lambda: auditor.last_error is None, "all is well")
        await eventually(lambda: drained(client), "all is written")

    async with connected(server) as db:
        rows = await db.fetch("SELECT id FROM requests WHERE status = 'completed' AND tier IS NOT NULL")
        assert sorted(row[0] for row in rows) == sorted(stream.ids)
    assert auditor.set_aside == 0


async def seen(auditor: Auditor, backlog_s: float, fault: str = "cannot be written") -> None:
    """Wait until the stats show a backlog that is so old, and name this fault. Another one may be named first:
    a session that is terminated on the way to it is a fault, too.
    """

    def shown() -> bool:
        return auditor.lag() > backlog_s and fault in str(auditor.last_error)

    await eventually(shown, f"a backlog of {backlog_s} s and {fault!r} are shown")


async def test_down_for_three_seconds(client: Redis, own_server: EmbeddedPostgres) -> None:
    """While PostgreSQL is down, the lag and the backlog grow."""
    async with audited(own_server, client) as auditor:
        await own_server.stop()
        await seen(auditor, 1.0)
        before = await client.llen(KEYS.outbox)
        await seen(auditor, 3.0)
        assert await client.llen(KEYS.outbox) > before
        await own_server.start()


async def test_locked_for_five_seconds(client: Redis, own_server: EmbeddedPostgres) -> None:
    """Statements time out instead of hanging, and the lag grows."""
    async with audited(own_server, client, statement_timeout_ms=1000) as auditor, connected(own_server) as db:
        async with db.transaction():
            await db.execute("LOCK TABLE requests IN ACCESS EXCLUSIVE MODE")
            written = auditor.rows_written
            await seen(auditor, 2.5, "statement timeout")
            await seen(auditor, 5.0)
            assert auditor.rows_written == written
        await eventually(lambda: auditor.lag() < 1, "the backlog is written soon after", 5.0)


async def test_a_commit_that_is_cut_in_the_middle(client: Redis, own_server: EmbeddedPostgres) -> None:
    """If the session is terminated in COMMIT before it is durable, the entries are written again."""
    async with audited(own_server, client) as auditor, connected(own_server) as db:
        table = await db.fetchval("SELECT tableoid::regclass::text FROM requests LIMIT 1")
        await db.execute(SLOW_COMMIT.format(table=table))
        for _ in range(2):
            await waiting(db, "PgSleep")
            await db.execute(TERMINATE)
            await eventually(lambda: not auditor.active, "the session is lost")
        await db.execute(f"DROP TRIGGER slow ON {table}")


async def test_a_commit_whose_answer_is_lost(client: Redis, tmp_path: Path) -> None:
    """If the session is terminated after its commit is durable, writing the entries again changes nothing."""
    replicated = ("-c", "fsync=off", "-c", "wal_level=replica", "-c", "max_wal_senders=1")
    server = EmbeddedPostgres(tmp_path, tmp_path / "socket", extra_args=replicated)
    await server.start()
    try:
        await upgrade_to_head(server.url)
        async with audited(server, client) as auditor, connected(server) as db:
            # A commit now waits for a standby that does not exist, when it is durable here already.
            await set_standbys(db, "nobody")
            await waiting(db, "SyncRep")
            before = await db.fetchval("SELECT count(*) FROM requests")
            written = auditor.rows_written
            await db.execute(TERMINATE)

            async def is_durable() -> bool:
                return bool(await db.fetchval("SELECT count(*) > $1 FROM requests", before))

            await eventually(is_durable, "the rows are there")
            assert auditor.rows_written == written
            await set_standbys(db, "")
    finally:
        await server.stop()


async def set_standbys(db: Connection, names: str) -> None:
    await db.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    await db.execute("SELECT pg_reload_conf()")


async def waiting(db: Connection, event: str) -> None:
    """Wait until the auditor's session waits for `event`."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tierlane-auditor' AND wait_event = $1"

    async def waits() -> bool:
        return bool(await db.fetchval(sql, event))

    await eventually(waits, f"the auditor waits for {event}")


async def test_every_process_killed(client: Redis, own_server: EmbeddedPostgres) -> None:
    """After SIGKILL of PostgreSQL committed rows exist, and the others are written again."""
    async with audited(own_server, client) as auditor:
        for _ in range(3):
            written = auditor.rows_written
            own_server.kill()
            await seen(auditor, 0.1)
            await own_server.start()
            await eventually(lambda written=written: auditor.rows_written > written, "it writes again")


async def test_a_full_disk(client: Redis, own_server: EmbeddedPostgres) -> None:
    """With a full disk entries wait, and are written when there is space again."""
    async with connected(own_server) as db:
        await db.execute(FILLER)
        async with audited(own_server, client) as auditor:
            full = limited_files if shutil.which("prlimit") else refusing_trigger
            async with full(db, own_server.pid) as what:
                await db.execute(TERMINATE)  # Sessions inherit the limit from the first process.
                await seen(auditor, 1.0, what)
                assert await db.fetchval("SELECT count(*) > 8300 FROM requests")


@asynccontextmanager
async def limited_files(db: Connection, pid: int) -> AsyncIterator[str]:
    """Files of processes that `pid` starts cannot grow further: writes fail with EFBIG. The server's own user does it.

    The program reads what it is sent: one that ends before PostgreSQL has sent its row breaks the pipe, and the test.
    """
    await db.execute(f"COPY (SELECT 1) TO PROGRAM 'cat >/dev/null && prlimit --pid={pid} --fsize={FILE_LIMIT}:'")
    yield "File too large"
    await db.execute(f"COPY (SELECT 1) TO PROGRAM 'cat >/dev/null && prlimit --pid={pid} --fsize=unlimited:'")


@asynccontextmanager
async def refusing_trigger(db: Connection, _: int) -> AsyncIterator[str]:
    """Where a system cannot limit another process: what PostgreSQL says when a disk is full, said by a trigger."""
    await db.execute(REFUSING_TRIGGER)
    yield "No space left"
    await db.execute("DROP FUNCTION refuse CASCADE")
