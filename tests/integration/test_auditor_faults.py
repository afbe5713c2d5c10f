"""The auditor while sessions or processes are killed, maintenance fails, or Redis is not available."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
from redis.asyncio import Redis

from eventually import eventually
from integration.auditor_bench import KEYS, accepted, auditor_for, drained, ended, new_ids, put, put_requests, running
from integration.ledger_fixtures import database_url, db, dsn, own_server, postgres_server
from ledger.audit.queries import count_requests
from scheduler.errors import RedisUnavailable
from scheduler.protocol.audit_outbox import Outbox
from scheduler.redis_client.connections import command_client
from tierlane.embedded.redis import EmbeddedRedis

__all__ = ["database_url", "db", "own_server", "postgres_server"]

Connection = Any
KILL_AUDITORS = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE application_name = 'tierlane-auditor' AND datname = current_database()"""

# An auditor that commits, prints it, and hangs before it drops entries.
HANGS_BEFORE_DROP = """
import asyncio, sys
from ledger.audit.auditor import Auditor, AuditPolicy
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.protocol.audit_outbox import Outbox

class Hanging(Outbox):
    async def drop(self, count, oldest, bad=()):
        print("committed", flush=True)
        await asyncio.Event().wait()

async def main(database, redis):
    client = command_client(redis)
    await Auditor(database, Hanging(client, Keys(), "doomed"), AuditPolicy(take_limit=20)).run()

asyncio.run(main(*sys.argv[1:]))
"""


class FailsToDrop(Outbox):
    """Loses Redis between commit and drop, a few times."""

    failures = 3

    async def drop(self, count: int, oldest: str, bad: Sequence[bytes] = ()) -> None:
        if self.failures:
            self.failures -= 1
            raise RedisUnavailable("Redis did not answer: cut off between commit and drop")
        await super().drop(count, oldest, bad)


async def test_killed_sessions_lose_and_repeat_nothing(client: Redis, database_url: str, db: Connection) -> None:
    """Repeatedly terminated sessions lose and repeat none of ten thousand requests, with a second auditor on standby."""
    ids = new_ids(10_000)
    kills = 0
    first, second = (auditor_for(database_url, client, name, take_limit=10) for name in ("a1", "a2"))
    async with running(first), running(second):
        await put_requests(client, ids)
        while not await drained(client):
            kills += int(await db.fetchval(KILL_AUDITORS))
            with contextlib.suppress(AssertionError):
                await eventually(lambda: drained(client), "all written before the next kill", 0.2)

    assert kills > 0
    assert await count_requests(db) == {"completed": 10_000}
    assert first.set_aside == second.set_aside == 0


async def test_a_process_killed_between_commit_and_drop_is_replayed(
    client: Redis, redis_url: str, database_url: str, db: Connection
) -> None:
    """After SIGKILL the lock is released, and the next auditor writes the entries of the dead one again."""
    ids = new_ids(50)
    await put_requests(client, ids, step=1)
    doomed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HANGS_BEFORE_DROP, database_url, redis_url, stdout=subprocess.PIPE
    )
    assert doomed.stdout is not None
    assert await doomed.stdout.readline() == b"committed\n"
    assert await count_requests(db) == {"completed": 10}
    assert await client.llen(KEYS.auditor_outbox("doomed")) == 20
    auditor = auditor_for(database_url, client)
    async with running(auditor):
        await eventually(lambda: auditor.lag() < 0.5, "the heir waits its turn")
        assert not auditor.active
        doomed.kill()
        await doomed.wait()
        await eventually(lambda: drained(client), "the heir has written all")

    assert await count_requests(db) == {"completed": 50}


async def test_redis_lost_between_commit_and_drop_is_replayed(client: Redis, database_url: str, db: Connection) -> None:
    """Committed entries that were not dropped are written again without effect, and dropped."""
    await put_requests(client, new_ids(100))
    outbox = FailsToDrop(client, KEYS, "a1")
    auditor = auditor_for(database_url, client, outbox=outbox)
    async with running(auditor):
        await eventually(lambda: drained(client), "all is dropped")

    assert outbox.failures == 0
    assert await count_requests(db) == {"completed": 100}
    assert auditor.last_error is None


async def test_redis_away_is_waited_out(tmp_path: Path, database_url: str, db: Connection) -> None:
    """While Redis is not available, the auditor keeps its lock and reports the problem; afterwards it continues."""
    server = EmbeddedRedis(tmp_path, tmp_path / "socket", ephemeral=True)
    await server.start()
    client = command_client(server.url)
    auditor = auditor_for(database_url, client)
    async with running(auditor):
        await eventually(lambda: auditor.active, "it is active")
        await server.stop()
        error = await eventually(lambda: auditor.last_error, "the fault is told")
        assert "Redis" in error
        assert auditor.active
        await server.start()
        await put_requests(client, new_ids(10))
        await eventually(lambda: drained(client), "all is written")

    await client.aclose()
    await server.stop()
    assert await count_requests(db) == {"completed": 10}


async def test_a_failing_chore_stops_no_writing(client: Redis, database_url: str, db: Connection) -> None:
    """A maintenance task that fails is reported, and rows are written."""
    await db.execute("DROP FUNCTION ensure_request_partitions")
    auditor = auditor_for(database_url, client)
    async with running(auditor):
        await put_requests(client, new_ids(10))
        await eventually(lambda: drained(client), "all is written")
        told = await eventually(lambda: auditor.last_error, "the fault is told")
        assert "cannot make partitions" in told
        await eventually(lambda: drained(client), "and it goes on")
        assert auditor.last_error == told  # the chores that succeeded since do not hide it

    assert await count_requests(db) == {"completed": 10}


async def test_whoever_lost_the_lock_cannot_write(client: Redis, database_url: str, db: Connection) -> None:
    """The lock belongs to the session that writes, so an auditor that has lost it cannot write."""
    auditor = auditor_for(database_url, client)
    async with running(auditor):
        await eventually(lambda: auditor.active, "it is active")
        rival = await asyncpg.connect(dsn(database_url))
        waiting = asyncio.create_task(rival.execute("SELECT pg_advisory_lock(7436002, hashtext('default'))"))

        async def is_queued() -> bool:
            return bool(await db.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))

        await eventually(is_queued, "the rival waits for the lock")
        await db.fetchval(KILL_AUDITORS)
        await waiting
        (request_id,) = new_ids(1)
        await put(client, [accepted(request_id), ended(request_id)])
        await eventually(lambda: not auditor.active, "it knows")
        assert await count_requests(db) == {}
        await rival.close()
        await eventually(lambda: drained(client), "it is active again and has written")

    assert await count_requests(db) == {"completed": 1}
