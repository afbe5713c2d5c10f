"""Quotas restored after a loss of Redis, with a real PostgreSQL and a real Redis."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import asyncpg
import msgspec
from redis.asyncio import Redis

from eventually import eventually
from integration.ledger_fixtures import database_url, db, dsn, own_server, postgres_server
from ledger.audit.quota_restore import QuotaKeeper, quota_spent
from ledger.catalog.loader import load
from ledger.catalog.snapshot import CellRow, Snapshot
from pool import Pool
from scheduler.cells.allotter import Allotter
from scheduler.protocol.limits import QuotaRestore, QuotaSpent
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all
from tierlane.roles.allotter import QuotaAudit, SharedCustomers
from tierlane_local.embedded.postgres import EmbeddedPostgres

__all__ = ["database_url", "db", "own_server", "postgres_server"]

Connection = Any
YEAR = [("1year", 10)]
ROWS = """
    INSERT INTO requests (id, created_at, customer_id, tier, model, status, error_code)
    SELECT 'req_' || lpad(to_hex(n), 32, '0'), $1, $2, 'paid', 'served', $4, $5
    FROM generate_series($3::int, $6::int) n"""


class RecordedRestore(QuotaRestore):
    """Records the quotas that are restored."""

    def __init__(self, client: Redis) -> None:
        super().__init__(client, Keys())
        self.restored: list[list[QuotaSpent]] = []

    async def apply(self, spent: Sequence[QuotaSpent], left: str = "") -> int:
        self.restored.append(list(spent))
        return await super().apply(spent, left)


async def spent_eight(db: Connection) -> str:
    """The id of a customer with ten requests per year. The audit has eight of them, and three that were refunded."""
    customer: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('acme', 'paid') RETURNING id::text")
    await db.execute("INSERT INTO quotas (customer_id, quota) VALUES ($1::text::uuid, '10/year')", customer)
    await db.execute("INSERT INTO models (name) VALUES ('served')")
    now = datetime.now(UTC)
    await db.execute(ROWS, now, customer, 1, "completed", None, 6)
    await db.execute(ROWS, now, customer, 7, "failed", "poison_request", 8)
    await db.execute(ROWS, now, customer, 9, "failed", "worker_lost", 11)
    return customer


async def outcomes(pool: Pool, customer: str, count: int) -> list[str]:
    """The outcomes of `count` requests of the customer."""
    verdicts = await pool.admit([pool.submission("paid", customer_id=customer, quotas=YEAR) for _ in range(count)])
    return [verdict.outcome.value for verdict in verdicts]


def catalog_of(snapshot: Snapshot) -> Callable[[], Snapshot]:
    return lambda: snapshot


async def test_after_a_loss_of_redis_the_counts_of_the_audit_are_restored(
    pool: Pool, database_url: str, db: Connection
) -> None:
    """Once per loss: eight of ten requests are spent, so two more are accepted."""
    customer = await spent_eight(db)
    restore = RecordedRestore(pool.client)
    keeper = QuotaKeeper(database_url, restore, catalog_of(await load(db)))

    for times in (1, 2):
        await pool.client.flushall()
        await pool.gateway_lives("g1")
        await keeper.look()
        await keeper.look()

        assert [[(s.customer_id, s.period, s.spent) for s in quotas] for quotas in restore.restored] == (
            [[(customer, "1year", 8)]] * times
        )
        assert await outcomes(pool, customer, 3) == ["accepted", "accepted", "quota"]


async def test_quotas_of_keys_are_restored_with_the_keys_that_continue_them(pool: Pool, db: Connection) -> None:
    """A rotated key and its successor count together; requests of other keys count for the customer only."""
    customer: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('acme', 'paid') RETURNING id::text")
    await db.execute("INSERT INTO models (name) VALUES ('served')")
    await db.execute("INSERT INTO quotas (customer_id, quota) VALUES ($1::text::uuid, '9/year')", customer)
    old, new, other = [(await db.fetchval("SELECT issue_api_key('acme', 'ci')"))[3:15] for _ in range(3)]
    own = ["5/year", "1000 tokens/year", "1 gpu-h/year", "3 usd/year"]
    await db.execute("UPDATE api_keys SET quotas = $1, quota_key = $2 WHERE id = $3", own, old, new)
    await db.execute("INSERT INTO prices VALUES ('served', now() - interval '1 day', 2, 0.5)")
    await db.execute(ROWS, datetime.now(UTC), customer, 1, "completed", None, 6)
    await db.execute("UPDATE requests SET cost_ms = 10, tokens_used = 100")
    keys = "(ARRAY[$1, $1, $2, $2, $2, $3])[substr(id, 36)::int]"
    await db.execute(f"UPDATE requests SET api_key_id = {keys}", old, new, other)

    spent = await quota_spent(db, await load(db))

    assert {each.period: each.spent for each in spent} == {
        "1year": 6,
        f"1year@{old}": 5,
        f"1year:tokens@{old}": 500,
        f"1year:gpu@{old}": 5 * 10_000,
        f"1year:usd@{old}": 5 * (10_000 * 2000 + 100 * 500_000),
    }
    assert await QuotaRestore(pool.client, Keys()).apply(spent) == 5


async def test_metered_quotas_are_restored_from_what_was_measured(pool: Pool, db: Connection) -> None:
    """GPU time, tokens, and money at the price of each request's time; failed and open requests count what was delivered."""
    customer: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('acme', 'paid') RETURNING id::text")
    await db.execute("INSERT INTO models (name) VALUES ('served')")
    for quota in ("1 gpu-h/year", "1000000 tokens/year", "0.5 usd/year"):
        await db.execute("INSERT INTO quotas (customer_id, quota) VALUES ($1::text::uuid, $2)", customer, quota)
    now = datetime.now(UTC)
    for days, per_gpu_s, per_1k in ((-9, 1, 0), (-1, 2, Decimal("0.5")), (9, 99, 99)):
        values = "'served', now() + make_interval(days => $3), $1, $2"
        await db.execute(f"INSERT INTO prices VALUES ({values})", per_gpu_s, per_1k, days)
    await db.execute(ROWS, now, customer, 1, "completed", None, 4)
    await db.execute(ROWS, now, customer, 5, "failed", "gpu_timeout", 6)
    await db.execute(ROWS, now, customer, 8, "failed", "worker_lost", 8)  # A stream that broke.
    await db.execute(ROWS, now, customer, 7, "queued", None, 7)
    await db.execute(
        "UPDATE requests SET cost_ms = 12.5, tokens_used = 200 WHERE error_code IS DISTINCT FROM 'gpu_timeout' AND status <> 'queued'"
    )

    spent = await quota_spent(db, await load(db))

    assert {each.period: each.spent for each in spent} == {
        "1year:gpu": 5 * 12_500,
        "1year:tokens": 1000,
        "1year:usd": 5 * (12_500 * 2000 + 200 * 500_000),
    }
    await QuotaRestore(pool.client, Keys()).apply(spent)
    assert await pool.client.hget(f"rl:customer:{customer}", "q:1year:tokens") == b"%d 1000" % (now.year - 1970)


async def test_quotas_are_restored_when_a_cell_is_drained(pool: Pool, database_url: str, db: Connection) -> None:
    """A lost cell does not return what its customers have spent. Counts that arrived from another cell are higher, and stay."""
    customer, other = await spent_eight(db), "other"
    restore, snapshot = RecordedRestore(pool.client), await load(db)
    cells = (CellRow("west", None, "open", 1.0), CellRow("north", None, "draining", 1.0))
    number = datetime.now(UTC).year - 1970
    await QuotaKeeper(database_url, restore, catalog_of(snapshot)).look()
    await pool.client.hset(f"rl:customer:{customer}", "q:1year", f"{number} 9")
    await pool.client.hset(f"rl:customer:{other}", "q:1year", f"{number} 5")
    await pool.client.pexpire(f"rl:customer:{other}", 60_000)

    for _ in range(2):
        await QuotaKeeper(database_url, restore, catalog_of(msgspec.structs.replace(snapshot, cells=cells))).look()

    assert len(restore.restored) == 2
    assert await outcomes(pool, customer, 2) == ["accepted", "quota"]
    assert await outcomes(pool, other, 6) == ["accepted"] * 5 + ["quota"]


async def test_an_unused_redis_is_not_changed(pool: Pool, database_url: str, db: Connection) -> None:
    """It has no epoch yet; nor is anything restored while the catalog is not loaded."""
    await spent_eight(db)
    restore = RecordedRestore(pool.client)
    await QuotaKeeper(database_url, restore, lambda: None).look()
    await pool.client.flushall()
    await QuotaKeeper(database_url, restore, catalog_of(await load(db))).look()

    assert restore.restored == []
    assert await pool.client.dbsize() == 0


async def test_without_quotas_postgresql_is_not_used(pool: Pool, db: Connection) -> None:
    """The restore is complete."""
    restore = RecordedRestore(pool.client)

    await QuotaKeeper("postgresql://nobody@/nowhere?host=/nonexistent", restore, catalog_of(await load(db))).look()

    assert restore.restored == [[]]
    assert not await restore.wanted()


async def test_the_restore_is_repeated_until_postgresql_is_available(pool: Pool, own_server: EmbeddedPostgres) -> None:
    """PostgreSQL is unavailable when Redis is lost: the quotas are restored once when it is available again."""
    connection = await asyncpg.connect(dsn(own_server.url))
    customer, snapshot = await spent_eight(connection), await load(connection)
    await connection.close()
    await own_server.stop()
    restore, looks = RecordedRestore(pool.client), []

    def look() -> Snapshot:
        looks.append(len(restore.restored))
        return snapshot

    running = asyncio.create_task(QuotaKeeper(own_server.url, restore, look, look_s=0.05).run())
    try:
        await eventually(lambda: len(looks) >= 3, "several attempts")
        assert restore.restored == []
        await own_server.start()
        await eventually(lambda: looks.count(1) >= 3, "the restore, and later checks")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert len(restore.restored) == 1
    assert await outcomes(pool, customer, 3) == ["accepted", "accepted", "quota"]


async def test_the_audit_of_a_customer_of_several_cells_is_not_restored_in_each(
    pool: Pool, database_url: str, db: Connection
) -> None:
    """It has the sum of all cells. The allotter counts what is missing in them, when it begins."""
    customer = await spent_eight(db)
    await db.execute("UPDATE customers SET spread = 2, burst = 100, max_concurrency = 100")
    snapshot = await load(db)
    restore = RecordedRestore(pool.client)
    await QuotaKeeper(database_url, restore, catalog_of(snapshot)).look()
    assert restore.restored == [[]]

    catalog: Any = SimpleNamespace(snapshot=snapshot)
    customers, url = SharedCustomers(catalog), str(pool.client.connection_pool.connection_kwargs["path"])
    allotter = Allotter("one", lambda: {"default": f"unix://{url}"}, customers.all, customers.find)
    running = asyncio.create_task(allotter.run())
    audit = asyncio.create_task(QuotaAudit(database_url, catalog, allotter).run())
    try:
        key = f"rl:customer:{customer}"

        async def granted() -> bool:
            value = await pool.client.hget(key, "g:1year")
            return value is not None and value.split()[1] == b"2"

        await eventually(granted, "two of ten requests are left")
    finally:
        await end_all([running, audit])
