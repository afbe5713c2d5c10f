"""The quota keeper between a real PostgreSQL and a real Redis: a Redis that came back empty knows again what was spent."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
from redis.asyncio import Redis

from eventually import eventually
from integration.ledger_fixtures import database_url, db, dsn, own_server, postgres_server
from ledger.audit.quota_restore import QuotaKeeper
from ledger.catalog.loader import load
from ledger.catalog.snapshot import Snapshot
from pool import Pool
from scheduler.protocol.limits import QuotaRestore, QuotaSpent
from scheduler.redis_client.keys import Keys
from tierlane.embedded.postgres import EmbeddedPostgres

__all__ = ["database_url", "db", "own_server", "postgres_server"]

Connection = Any
YEAR = [("1year", 10)]
ROWS = """
    INSERT INTO requests (id, created_at, customer_id, tier, model, status, error_code)
    SELECT 'req_' || lpad(to_hex(n), 32, '0'), $1, $2, 'paid', 'served', $4, $5
    FROM generate_series($3::int, $6::int) n"""


class Told(QuotaRestore):
    """Remembers what it was asked to tell."""

    def __init__(self, client: Redis) -> None:
        super().__init__(client, Keys())
        self.told: list[list[QuotaSpent]] = []

    async def tell(self, spent: Sequence[QuotaSpent]) -> int:
        self.told.append(list(spent))
        return await super().tell(spent)


async def spent_eight(db: Connection) -> str:
    """The id of a customer with ten requests a year, eight of which the audit has; three failures were ours."""
    customer: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('acme', 'paid') RETURNING id::text")
    await db.execute("INSERT INTO quotas (customer_id, quota) VALUES ($1::text::uuid, '10/year')", customer)
    await db.execute("INSERT INTO models (name) VALUES ('served')")
    now = datetime.now(UTC)
    await db.execute(ROWS, now, customer, 1, "completed", None, 6)
    await db.execute(ROWS, now, customer, 7, "failed", "poison_request", 8)
    await db.execute(ROWS, now, customer, 9, "failed", "worker_lost", 11)
    return customer


async def asked(pool: Pool, customer: str, count: int) -> list[str]:
    """What `count` requests of the customer are told."""
    verdicts = await pool.admit([pool.submission("paid", customer_id=customer, quotas=YEAR) for _ in range(count)])
    return [verdict.outcome.value for verdict in verdicts]


def of(snapshot: Snapshot) -> Callable[[], Snapshot]:
    return lambda: snapshot


async def test_an_emptied_redis_holds_what_the_audit_knows(pool: Pool, database_url: str, db: Connection) -> None:
    """Eight of ten are spent: two more enter, the third is refused, after every loss of Redis; nothing is told twice."""
    customer = await spent_eight(db)
    restore = Told(pool.client)
    supervisor = QuotaKeeper(database_url, restore, of(await load(db)))

    for times in (1, 2):
        await pool.client.flushall()
        await pool.gateway_lives("g1")
        await supervisor.look()
        await supervisor.look()

        assert [[(s.customer_id, s.period, s.spent) for s in told] for told in restore.told] == (
            [[(customer, "1year", 8)]] * times
        )
        assert await asked(pool, customer, 3) == ["accepted", "accepted", "quota"]


async def test_a_redis_that_nobody_uses_is_left_alone(pool: Pool, database_url: str, db: Connection) -> None:
    """It has no beginning yet; and while the catalog is not known there is nothing to tell."""
    await spent_eight(db)
    restore = Told(pool.client)
    await QuotaKeeper(database_url, restore, lambda: None).look()
    await pool.client.flushall()
    await QuotaKeeper(database_url, restore, of(await load(db))).look()

    assert restore.told == []
    assert await pool.client.dbsize() == 0


async def test_where_nobody_has_a_quota_postgresql_is_not_asked(pool: Pool, db: Connection) -> None:
    """Redis is told that this was all."""
    restore = Told(pool.client)

    await QuotaKeeper("postgresql://nobody@/nowhere?host=/nonexistent", restore, of(await load(db))).look()

    assert restore.told == [[]]
    assert not await restore.wanted()


async def test_it_heals_when_postgresql_comes_back(pool: Pool, own_server: EmbeddedPostgres) -> None:
    """Away when Redis was emptied: it is tried again and again, and told once, soon after the return."""
    connection = await asyncpg.connect(dsn(own_server.url))
    customer, snapshot = await spent_eight(connection), await load(connection)
    await connection.close()
    await own_server.stop()
    restore, looks = Told(pool.client), []

    def look() -> Snapshot:
        looks.append(len(restore.told))
        return snapshot

    running = asyncio.create_task(QuotaKeeper(own_server.url, restore, look, look_s=0.05).run())
    try:
        await eventually(lambda: len(looks) >= 3, "it tried again")
        assert restore.told == []
        await own_server.start()
        await eventually(lambda: looks.count(1) >= 3, "Redis was told, and it looked again")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert len(restore.told) == 1
    assert await asked(pool, customer, 3) == ["accepted", "accepted", "quota"]
