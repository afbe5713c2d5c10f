"""The auditor with a table that differs from the migrations: entries wait, and no record is set aside."""

from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.auditor_bench import accepted, auditor_for, drained, new_ids, put, put_requests, running
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.audit.maintenance import MaintenancePolicy
from ledger.audit.queries import count_requests

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


async def test_a_missing_partition_is_not_the_rows_fault(client: Redis, database_url: str, db: Connection) -> None:
    """Without a partition entries wait."""
    partitions = [row[0] for row in await db.fetch("SELECT inhrelid::regclass::text FROM pg_inherits JOIN pg_class "
                                                  "ON oid = inhparent WHERE relkind = 'p'")]  # fmt: skip
    for partition in partitions:
        await db.execute(f"ALTER TABLE requests DETACH PARTITION {partition}")
    (request_id,) = new_ids(1)
    await put(client, [accepted(request_id)])
    auditor = auditor_for(database_url, client, maintenance=MaintenancePolicy(partitions_every_s=1e9))
    auditor.maintenance._partitions_due = 1e18  # Nobody makes any.
    async with running(auditor):
        error = await eventually(lambda: auditor.last_error, "the fault is told")
        assert "partition" in error
        await db.execute("ALTER TABLE requests ATTACH PARTITION requests_default DEFAULT")
        await eventually(lambda: drained(client), "the outbox is empty")

    assert await count_requests(db) == {"queued": 1}
    assert auditor.set_aside == 0


async def test_an_unmigrated_database_is_waited_for(client: Redis, database_url: str, db: Connection) -> None:
    """Without tables the auditor reports the command to run, and starts after it."""
    await db.execute("ALTER TABLE requests RENAME TO elsewhere")
    await put_requests(client, new_ids(10))
    auditor = auditor_for(database_url, client, maintenance=MaintenancePolicy(partitions_every_s=1e9))
    async with running(auditor):
        error = await eventually(lambda: auditor.last_error, "the fault is told")
        assert "tierlane migrate" in error
        await db.execute("ALTER TABLE elsewhere RENAME TO requests")
        await eventually(lambda: drained(client), "all is written")

    assert await count_requests(db) == {"completed": 10}


@pytest.mark.parametrize("other", ["smallint", "bigint"])
async def test_a_column_of_another_type_is_waited_out(
    client: Redis, database_url: str, db: Connection, other: str
) -> None:
    """With another column type entries wait."""
    await db.execute(f"ALTER TABLE requests ALTER COLUMN attempts TYPE {other}")
    await put_requests(client, new_ids(10))
    auditor = auditor_for(database_url, client)
    async with running(auditor):
        error = await eventually(lambda: auditor.last_error, "the fault is told")
        assert "cannot be written" in error
        await db.execute("ALTER TABLE requests ALTER COLUMN attempts TYPE integer")
        await eventually(lambda: drained(client), "all is written")

    assert await count_requests(db) == {"completed": 10}
    assert auditor.set_aside == 0
