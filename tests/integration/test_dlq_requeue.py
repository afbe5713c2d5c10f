"""`tierlane dlq requeue` on real servers: run again under a new id, told how it ended, or refused in one sentence."""

import asyncio
import re
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from eventually import eventually
from integration.auditor_bench import auditor_for, running
from integration.dashboard_bench import record
from integration.dlq_bench import command, customer, letter, worker
from integration.ledger_fixtures import database_url, db, dsn, postgres_server
from ledger.audit.queries import find_request
from ledger.dead_letters import find_letter, mark_requeued, unmark_requeued
from pool import Pool, done
from scheduler.protocol.batches import Outcome
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.request_id import new_request_id
from tierlane.embedded.redis import EmbeddedRedis

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
LINE = re.compile(r"(req_[0-9a-f]{32}) -> (req_[0-9a-f]{32}): (.*)\n")


def poison(request_id: str) -> Outcome:
    return Outcome(request_id, "poison_request", 50.0, 0, "v1", "It broke.")


async def test_it_runs_again_under_a_new_id(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """In its customer's tier of today, past all limits; noted in the letter, off the list in Redis, in the audit."""
    acme = await customer(db, tier="enterprise")
    old = await letter(db, customer_id=acme, tier="free")
    await pool.client.lpush(pool.keys.dlq, old)

    async with worker(pool, done):
        ran = await command("requeue", old, redis_url=redis_url, database_url=database_url)

    assert (ran.exit_code, ran.stderr) == (0, "")
    told, new, how = LINE.fullmatch(ran.stdout).groups()
    assert told == old
    assert re.fullmatch(r"completed after \d+ ms and 1 run\.", how)
    found = await find_letter(db, old)
    assert found is not None
    assert (found.requeued_as, found.requeued_at is not None) == (new, True)
    assert not await pool.client.exists(pool.keys.dlq)
    assert await pool.client.zcard(pool.keys.gateways) == 1  # The test's own: the small one has left.
    assert [key async for key in pool.client.scan_iter("rl:*")] == []
    async with running(auditor_for(database_url, pool.client)):
        await eventually(lambda: find_request(db, new), "the audit has it")
    row = await find_request(db, new)
    assert row is not None
    assert (row.customer_id, row.tier, row.status, row.api_key_id) == (acme, "enterprise", "completed", None)


async def test_it_is_on_record(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """Who made which request of which letter; and of a purge, what is gone. In the transaction of the deed."""
    old = await letter(db, customer_id=await customer(db))

    async with worker(pool, done):
        await command("requeue", old, "--actor", "ann", redis_url=redis_url, database_url=database_url)
    new = await db.fetchval("SELECT requeued_as FROM dead_letters")
    await command("purge", old, "--actor", "bob", redis_url=redis_url, database_url=database_url)

    assert await record(db, "dead_letters") == [
        ("ann", "by id", {"requeued_as": {old: None}}, {"requeued_as": {old: new}}),
        ("bob", "by id", {"count": 1, "request_ids": [old]}, None),
    ]


async def test_what_fails_again_is_told(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """With its code, and exit code 1; it is a dead letter of its own then."""
    old = await letter(db, customer_id=await customer(db))

    async with worker(pool, poison):
        ran = await command("requeue", old, redis_url=redis_url, database_url=database_url)

    assert ran.exit_code == 1
    _, new, how = LINE.fullmatch(ran.stdout).groups()
    assert how.startswith("failed, poison_request after ")
    assert await pool.client.lrange(pool.keys.dlq, 0, -1) == [new.encode()]


async def test_many_run_in_blocks(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """Each is told once, whatever becomes of the others."""
    acme = await customer(db)
    ids = [await letter(db, customer_id=acme) for _ in range(40)]

    def answer(request_id: str) -> Outcome:
        return poison(request_id) if request_id.endswith(("0", "1", "2", "3")) else done(request_id)

    async with worker(pool, answer):
        ran = await command("requeue", *ids, ids[0], "req_x", redis_url=redis_url, database_url=database_url)

    lines = LINE.findall(ran.stdout)
    assert sorted(old for old, _, _ in lines) == sorted(ids)
    assert {how.split()[0] for _, new, how in lines if new[-1] in "0123"} <= {"failed,"}
    assert {how.split()[0] for _, new, how in lines if new[-1] not in "0123"} == {"completed"}
    assert (ran.exit_code, ran.stderr) == (1, "There is no dead letter req_x.\n")


async def test_twice_only_when_told_so(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """A slip of the finger does not run it again; --again does, and the letter names the last one."""
    old = await letter(db, customer_id=await customer(db))
    servers = {"redis_url": redis_url, "database_url": database_url}
    async with worker(pool, done):
        first = LINE.fullmatch((await command("requeue", old, **servers)).stdout).group(2)
        refused = await command("requeue", old, **servers)
        second = LINE.fullmatch((await command("requeue", old, "--again", **servers)).stdout).group(2)

    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == f"{old}: It was already requeued, as {first}; use --again to requeue it once more.\n"
    found = await find_letter(db, old)
    assert found is not None
    assert found.requeued_as == second != first


@pytest.mark.parametrize(
    ("fields", "sql", "why"),
    [
        ({"body": None}, "", "Its input was not stored."),
        ({"body": b"\xc1"}, "", "Its input cannot be read."),
        ({}, "DELETE FROM customers", "Its customer was deleted."),
        ({"customer_id": None}, "", "Its customer was deleted."),
        ({}, "UPDATE customers SET status = 'suspended'", "Its customer is suspended."),
        (
            {},
            "UPDATE models SET enabled = false",
            "This pool has no enabled model 'tiny'; use --pool for another pool.",
        ),
        (
            {},
            "UPDATE models SET pool = 'other'",
            "This pool has no enabled model 'tiny'; use --pool for another pool.",
        ),
    ],
)
async def test_what_cannot_run_is_refused(
    pool: Pool, redis_url: str, database_url: str, db: Connection, fields: dict[str, Any], sql: str, why: str
) -> None:
    """In one sentence, with nothing queued and nothing noted."""
    old = await letter(db, **{"customer_id": await customer(db)} | fields)
    if sql:
        await db.execute(sql)
    await pool.worker_beats("w1")

    ran = await command("requeue", old, redis_url=redis_url, database_url=database_url)

    assert (ran.exit_code, ran.stdout, ran.stderr) == (1, "", f"{old}: {why}\n")
    assert await pool.depth("paid") == 0
    assert await db.fetchval("SELECT requeued_as FROM dead_letters") is None


async def test_without_a_healthy_worker_nothing_is_queued(
    pool: Pool, redis_url: str, database_url: str, db: Connection
) -> None:
    """It would only die again, of waiting."""
    old = await letter(db, customer_id=await customer(db))
    await pool.worker_beats("w1", "starting")

    ran = await command("requeue", old, redis_url=redis_url, database_url=database_url)

    assert (ran.exit_code, ran.stdout) == (1, "")
    assert ran.stderr == "No worker of pool default is healthy, so nothing was requeued.\n"
    assert await pool.depth("paid") == 0
    assert await db.fetchval("SELECT requeued_as FROM dead_letters") is None


@pytest.mark.parametrize("away", ["", "unix:///nonexistent/redis.sock"])
async def test_without_redis_it_is_an_error(database_url: str, db: Connection, away: str) -> None:
    """One sentence, exit code 1."""
    old = await letter(db, customer_id=await customer(db))

    ran = await command("requeue", old, redis_url=away, database_url=database_url)

    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "Redis" in ran.stderr.replace("REDIS", "Redis")


async def test_a_full_redis_takes_the_note_back(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """Nothing was queued, so nothing was requeued."""
    old = await letter(db, customer_id=await customer(db))
    await pool.worker_beats("w1")
    await pool.client.config_set("maxmemory", 1)
    try:
        ran = await command("requeue", old, redis_url=redis_url, database_url=database_url)
    finally:
        await pool.client.config_set("maxmemory", 0)

    assert (ran.exit_code, ran.stdout, ran.stderr) == (1, "", f"{old}: Redis is out of memory, so it was not queued.\n")
    assert await db.fetchval("SELECT requeued_as FROM dead_letters") is None


async def test_an_end_that_does_not_come_is_told(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """The command does not wait for longer than a client would."""
    old = await letter(db, customer_id=await customer(db))
    await pool.worker_beats("w1")

    ran = await command("requeue", old, redis_url=redis_url, database_url=database_url)

    assert ran.exit_code == 1
    assert re.search(r": no result within \d s; see the audit\.\n", ran.stdout)


async def test_redis_lost_meanwhile_is_waited_out(tmp_path: Path, database_url: str, db: Connection) -> None:
    """It may come back; where it does not, the letter still names the new request, and nothing is run twice unasked."""
    server = EmbeddedRedis(tmp_path, tmp_path / "socket", ephemeral=True)
    await server.start()
    pool = Pool(command_client(server.url), Keys())
    old = await letter(db, customer_id=await customer(db))
    await pool.worker_beats("w1")
    ran = asyncio.create_task(command("requeue", old, redis_url=server.url, database_url=database_url))

    async def is_queued() -> bool:
        return await pool.depth("paid") == 1

    await eventually(is_queued, "it is queued")
    server.kill()
    result = await ran
    await pool.client.aclose()

    assert result.exit_code == 1
    assert "no result within" in result.stdout
    assert "Traceback" not in result.stderr
    assert await db.fetchval("SELECT requeued_as FROM dead_letters") in result.stdout


async def test_of_two_operators_one_is_told(database_url: str, db: Connection) -> None:
    """Both read the letter, both try to note their request: one wins. A note is only taken back by whoever made it."""
    old = await letter(db)
    other = await asyncpg.connect(dsn(database_url))
    seen = await find_letter(db, old)
    assert seen is not None
    mine, theirs = new_request_id(), new_request_id()

    won = await asyncio.gather(mark_requeued(db, seen, mine), mark_requeued(other, seen, theirs))

    assert sorted(won) == [False, True]
    winner, loser = (mine, theirs) if won[0] else (theirs, mine)
    await unmark_requeued(db, seen, loser)
    assert await db.fetchval("SELECT requeued_as FROM dead_letters") == winner
    await unmark_requeued(db, seen, winner)
    assert await find_letter(db, old) == seen
    await other.close()
