"""Auditors of two pools on one table."""

from redis.asyncio import Redis

from eventually import eventually
from integration.auditor_bench import accepted, auditor_for, ended, new_ids, put, running
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.audit.queries import find_request
from ledger.postgres import Connection
from scheduler.protocol.audit_outbox import Outbox, encode_records
from scheduler.redis_client.keys import Keys

__all__ = ["database_url", "db", "postgres_server"]

SECOND = Keys("second")
MODEL = (
    "INSERT INTO models (name, pool, max_batch_size, max_wait_ms, gpu_timeout_ms, rps_per_gpu, target_utilization, enabled) "
    "VALUES ($1, $2, 8, 40, 3000, 50, 0.9, true)"
)


async def test_auditors_of_two_pools_are_active_together(client: Redis, database_url: str, db: Connection) -> None:
    """Auditors of two pools are active at the same time, each for its own outbox."""
    first, second = new_ids(2)
    await put(client, [accepted(first)], [ended(first)])
    for entry in ([accepted(second)], [ended(second)]):
        await client.lpush(SECOND.outbox, encode_records(list(entry)))
    own = auditor_for(database_url, client)
    other = auditor_for(database_url, client, outbox=Outbox(client, SECOND, "a2"), pool="second")

    async with running(own), running(other):
        await eventually(lambda: own.active and other.active, "both are active")

        async def ends() -> list[str]:
            found = [await find_request(db, each) for each in (first, second)]
            return [row.status for row in found if row and row.status == "completed"]

        async def written() -> bool:
            return len(await ends()) == 2

        await eventually(written, "both are written")


async def test_an_auditor_closes_no_row_of_another_pool(client: Redis, database_url: str, db: Connection) -> None:
    """An auditor closes no row of another pool's model; rows of deleted models are closed by any."""
    await db.execute(MODEL, "mine", "default")
    await db.execute(MODEL, "theirs", "second")
    aged = ["req_" + f"{int(i[4:16], 16) - 60_000:012x}" + i[16:] for i in new_ids(3)]
    models = ("mine", "theirs", "gone")
    await put(client, *([accepted(i, model=model)] for i, model in zip(aged, models, strict=True)))
    auditor = auditor_for(database_url, client)

    async with running(auditor):
        await eventually(lambda: auditor.maintenance.closed == 2, "two are closed")

    rows = [await find_request(db, each) for each in aged]
    assert [row.error_code for row in rows if row] == ["abandoned", None, "abandoned"]
