"""Step 7: the audit row.

Each script that accepts or ends a request adds a record to the outbox in Redis, in the same step. The auditor, one of those in
all schedulers, takes the records, writes one row for each request to PostgreSQL, and drops them after the commit.
"""

import asyncpg
from redis.asyncio import Redis

from integration.audit_fixtures import CUSTOMER, audit
from integration.gateway_fixtures import Stack, stack
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.audit.queries import find_request

__all__ = ["database_url", "db", "postgres_server", "stack"]


async def test_each_request_has_one_row(
    stack: Stack, client: Redis, database_url: str, db: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """The row has who sent the request, how it ended, and how long each stage took; it never has the input or the output."""
    stack.catalog.set(key={"customer_id": CUSTOMER})
    _, document, _ = await stack.infer({"input": "hello"})

    await audit(database_url, client)

    row = await find_request(db, document["request_id"])
    assert row is not None
    assert (row.status, row.tier, row.http_status, row.attempts) == ("completed", "free", 200, 1)
    assert (row.customer_id, row.worker_id, row.gateway_id) == (CUSTOMER, "worker-1", "g1")
    assert (row.input_bytes, row.output_bytes) == (5, 5)
    assert await db.fetchval("SELECT count(*) FROM requests") == 1
