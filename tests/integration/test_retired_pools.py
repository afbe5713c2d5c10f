"""Pools that no model names any more: schedulers, or gateways in their place, find and finish what is unfinished there."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.audit_fixtures import CUSTOMER
from integration.gateway_fixtures import LiteralCatalog, running_stack
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.audit.queries import find_request
from ledger.catalog.snapshot import Model, Snapshot, Tier
from ledger.jobs import JobEnd, NewJob, end_jobs, insert_jobs
from ledger.postgres import Connection
from pool import TIERS, Pool, done
from scheduler.protocol.audit_outbox import name_of
from scheduler.protocol.pool_view import Unfinished
from scheduler.redis_client.keys import Keys
from tierlane.roles.scheduler import serve_pools
from tierlane.roles.served_pools import LeftPools
from tierlane.roles.stand_in import StandIn
from tierlane.settings.model import Settings

__all__ = ["database_url", "db", "postgres_server"]

SNAPSHOT = Snapshot(
    1,
    tuple(Tier(name, n, 0.1, (), 1000, None, None, None) for n, name in enumerate(TIERS)),
    {},
    {},
    {
        "tiny": Model("tiny", "default", 32, None, 40, 1000.0, 0.8, 0, enabled=True),
        "off": Model("off", "off", 32, None, 40, 1000.0, 0.8, 0, enabled=False),
    },
    (),
)
CATALOG: Any = SimpleNamespace(snapshot=SNAPSHOT, fresh=True)


@pytest.fixture
def old(client: Redis) -> Pool:
    """A pool that no model names."""
    return Pool(client, Keys("old"))


async def drop_audit(pool: Pool) -> None:
    """Audit what is in the outbox; meanwhile the pool must not be empty."""
    taken = await pool.outbox.take(10)
    assert not await Unfinished(pool.client).is_empty(pool.keys, TIERS)
    await pool.outbox.drop(len(taken.entries), name_of(taken.entries[0]))


async def test_a_pool_is_empty_once_everything_is_audited(client: Redis, old: Pool) -> None:
    """It is not while a request waits, is ready, runs, or has entries in the outbox or in the auditor's list."""
    unfinished = Unfinished(client)
    assert await unfinished.is_empty(old.keys, TIERS)
    await old.queue(1)
    await drop_audit(old)
    assert not await unfinished.is_empty(old.keys, TIERS)  # It waits.
    await old.form([("free", 1)])
    assert not await unfinished.is_empty(old.keys, TIERS)  # It is ready.
    claimed = await old.claim_next()
    assert not await unfinished.is_empty(old.keys, TIERS)  # It runs.
    await old.batches.finish(claimed.batch_id, "token", [done(claimed.requests[0].id)])
    assert not await unfinished.is_empty(old.keys, TIERS)  # Its end is in the outbox.
    await drop_audit(old)
    assert await unfinished.is_empty(old.keys, TIERS)


async def test_unfinished_pools_are_kept_until_they_are_empty(client: Redis, old: Pool, database_url: str) -> None:
    """Empty pools and invalid names are removed; pools of the catalog are kept."""
    await client.sadd("pools", "old", "gone", "{odd}:", b"\xff")
    left = LeftPools(client, CATALOG, database_url, {"default", "served"})
    await old.queue(1)

    await left.turn()
    assert left.names == {"old"}
    assert await Unfinished(client).pools() == {"default", "off", "old"}

    await old.overdue([(await client.lrange(old.keys.queue("free"), 0, -1))[0].decode()])
    await old.terminations.expire(TIERS)
    await drop_audit(old)
    await left.turn()
    assert left.names == frozenset()
    assert await Unfinished(client).pools() == {"default", "off"}


async def test_a_pool_with_jobs_is_unfinished(client: Redis, database_url: str, db: Connection) -> None:
    """Jobs are in PostgreSQL, and in no queue after a loss of Redis: until they are ended and audited."""
    now = itertools.count(0.0, 100.0)
    await db.execute("INSERT INTO customers (id, name, tier) VALUES ($1, 'c', 'free')", CUSTOMER)
    job = Pool(client, Keys("old")).submission(customer_id=CUSTOMER, api_key_id="k" * 12, body=b"x")
    await insert_jobs(db, [NewJob(job, 60.0)], "old")
    left = LeftPools(client, CATALOG, database_url, (), clock=lambda: next(now))

    await left.turn()
    await end_jobs(db, [JobEnd(job.id, "")], 600.0)
    await left.turn()
    assert left.names == {"old"}
    await db.execute("UPDATE jobs SET audited = true")
    await left.turn()
    assert left.names == frozenset()


async def test_no_pool_is_removed_without_postgresql(client: Redis) -> None:
    """Its jobs are not known then."""
    await client.sadd("pools", "old")
    left = LeftPools(client, CATALOG, "postgresql+asyncpg://nobody@127.0.0.1:1/none", ())
    await left.turn()

    assert left.names == {"old"}
    assert "old" in await Unfinished(client).pools()


async def test_a_request_of_a_retired_pool_ends(
    client: Redis, redis_url: str, old: Pool, database_url: str, db: Connection
) -> None:
    """A scheduler that starts finds the pool; the request exceeds its queue time, is audited, and the pool is removed."""
    await client.sadd("pools", "old")
    (waiting,) = await old.queue(1, customer_id=CUSTOMER, api_key_id="k" * 12, queue_ms=50)
    stop = asyncio.Event()
    settings = Settings(redis_url=redis_url, database_url=database_url)
    serving = asyncio.create_task(serve_pools(settings, stop, CATALOG, client, lambda *_: {}))

    async def code() -> str | None:
        row = await find_request(db, waiting)
        return row.error_code if row else None

    async def is_removed() -> bool:
        return "old" not in await Unfinished(client).pools()

    try:
        assert await eventually(code, "the audit has its end") == "queue_timeout"
        await eventually(is_removed, "the pool is removed")
    finally:
        stop.set()
        await serving


async def test_a_gateway_without_schedulers_ends_the_request_of_a_retired_pool(
    client: Redis, redis_url: str, old: Pool, database_url: str, db: Connection
) -> None:
    """It finds the pool as a scheduler does; when it stops, the audit of its last request is written before it ends."""
    await client.sadd("pools", "old")
    (waiting,) = await old.queue(1, customer_id=CUSTOMER, api_key_id="k" * 12, queue_ms=50)
    catalog = LiteralCatalog()
    catalog.set(key={"customer_id": CUSTOMER})
    schedule = StandIn(Settings(redis_url=redis_url, database_url=database_url), catalog).run  # type: ignore[arg-type]

    async def code() -> str | None:
        row = await find_request(db, waiting)
        return row.error_code if row else None

    async def is_removed() -> bool:
        return await Unfinished(client).pools() == {"default"}

    async with running_stack(client, redis_url, catalog=catalog, schedule=schedule, schedulers_expected=False) as stack:
        stack.worker.reaps = False
        assert await eventually(code, "the audit has its end") == "queue_timeout"
        await eventually(is_removed, "the pool is removed")
        status, document, _ = await stack.infer()

    row = await find_request(db, document["request_id"])
    assert status == 200
    assert row is not None
    assert row.status == "completed"
