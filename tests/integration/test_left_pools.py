"""Pools that no model names any more: what is unfinished there is found by a scheduler that starts later, and by no other."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.auditor_bench import CUSTOMER
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.audit.queries import find_request
from ledger.jobs import JobEnd, NewJob, end_jobs, insert_jobs
from ledger.postgres import Connection
from pool import TIERS, Pool, done
from scheduler.protocol.audit_outbox import name_of
from scheduler.protocol.pool_view import Unfinished
from scheduler.redis_client.keys import Keys
from tierlane.roles.scheduler import LeftPools, serve_pools
from tierlane.settings.model import Settings

__all__ = ["database_url", "db", "postgres_server"]

SNAPSHOT = SimpleNamespace(
    models={"tiny": SimpleNamespace(pool="default", enabled=True), "off": SimpleNamespace(pool="off", enabled=False)},
    tiers=[SimpleNamespace(name=name, priority=n, guaranteed_share=0.1, paused=False) for n, name in enumerate(TIERS)],
    cordoned=frozenset(),
    quotas={},
)
CATALOG: Any = SimpleNamespace(snapshot=SNAPSHOT, fresh=True)


@pytest.fixture
def old(client: Redis) -> Pool:
    """A pool that no row names."""
    return Pool(client, Keys("old"))


async def test_a_pool_is_empty_once_all_is_written(client: Redis, old: Pool) -> None:
    """Not while something waits, stands ready, runs, or is in an outbox or in an auditor's own list."""
    unfinished = Unfinished(client)

    async def empty() -> bool:
        return await unfinished.is_empty(old.keys, TIERS)

    assert await empty()
    await old.queue(1)
    taken = await old.outbox.take(10)
    await old.outbox.drop(1, name_of(taken.entries[0]))
    assert not await empty()  # It waits.
    await old.form([("free", 1)])
    assert not await empty()  # It stands ready.
    claimed = await old.claim_next()
    assert not await empty()  # It runs.
    await old.batches.finish(claimed.batch_id, "token", [done(claimed.requests[0].id)])
    assert not await empty()  # Its end is in the outbox.
    taken = await old.outbox.take(10)
    assert not await empty()  # An auditor has it.
    await old.outbox.drop(1, name_of(taken.entries[0]))
    assert await empty()


async def test_what_is_named_or_unfinished_is_noted(client: Redis, old: Pool, database_url: str) -> None:
    """And forgotten when it is neither; what is no pool's name is passed over."""
    await client.sadd("pools", "old", "gone", "{odd}:", b"\xff")
    left = LeftPools(client, CATALOG, database_url, {"default", "served"})
    await old.queue(1)

    await left.turn()
    assert left.names == {"old"}
    assert await Unfinished(client).pools() == {"default", "off", "old"}

    await old.overdue([(await client.lrange(old.keys.queue("free"), 0, -1))[0].decode()])
    await old.terminations.expire(TIERS)
    taken = await old.outbox.take(10)
    await old.outbox.drop(len(taken.entries), name_of(taken.entries[0]))
    await left.turn()
    assert left.names == frozenset()
    assert await Unfinished(client).pools() == {"default", "off"}


async def test_a_pool_with_jobs_is_unfinished(client: Redis, database_url: str, db: Connection) -> None:
    """They stand in PostgreSQL, and in no queue when Redis came back empty: until they are ended and audited."""
    now = itertools.count(0.0, 100.0)
    await db.execute("INSERT INTO customers (id, name, tier) VALUES ($1, 'c', 'free')", CUSTOMER)
    job = Pool(client, Keys("old")).submission(customer_id=CUSTOMER, api_key_id="k" * 12, body=b"x")
    await insert_jobs(db, [NewJob(job, 60.0)], "old")
    left = LeftPools(client, CATALOG, database_url, (), lambda: next(now))

    await left.turn()
    assert left.names == {"old"}
    await end_jobs(db, [JobEnd(job.id, "")], 600.0)
    await left.turn()
    assert left.names == {"old"}
    await db.execute("UPDATE jobs SET audited = true")
    await left.turn()
    assert left.names == frozenset()


async def test_nothing_is_forgotten_before_jobs_were_looked_at(client: Redis) -> None:
    """Without PostgreSQL nobody knows of them."""
    await client.sadd("pools", "old")
    left = LeftPools(client, CATALOG, "postgresql+asyncpg://nobody@127.0.0.1:1/none", ())

    await left.turn()

    assert left.names == {"old"}
    assert "old" in await Unfinished(client).pools()


async def test_what_waits_in_a_left_pool_without_workers_ends(
    client: Redis, redis_url: str, old: Pool, database_url: str, db: Connection
) -> None:
    """A scheduler that starts finds the pool: the request is over its time in the queue, and its row says so."""
    await client.sadd("pools", "old")
    (waiting,) = await old.queue(1, customer_id=CUSTOMER, api_key_id="k" * 12, queue_ms=50)
    stop = asyncio.Event()
    settings = Settings(redis_url=redis_url, database_url=database_url)
    serving = asyncio.create_task(serve_pools(settings, stop, CATALOG, client))

    async def code() -> str | None:
        row = await find_request(db, waiting)
        return row.error_code if row else None

    try:
        assert await eventually(code, "the audit has its end") == "queue_timeout"
        await eventually(lambda: forgotten(client), "the pool is forgotten")
    finally:
        stop.set()
        await serving


async def forgotten(client: Redis) -> bool:
    return "old" not in await Unfinished(client).pools()
