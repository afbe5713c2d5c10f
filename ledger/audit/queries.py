"""Reading the audit: one request by its id, which also says in which partition it is, and what a customer has used.

The audit is late by its lag, up to two seconds: nobody is admitted or rejected by these numbers alone.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import asyncpg
import msgspec

from ledger.catalog.quotas import window_number, window_start
from ledger.catalog.snapshot import Snapshot
from ledger.postgres import Connection, statement
from scheduler.errors import ErrorCode
from scheduler.request_id import created_at


class Queries(Protocol):
    """What of an asyncpg pool or connection is needed here."""

    async def fetch(self, query: str, *args: Any) -> Sequence[asyncpg.Record]: ...

    async def fetchrow(self, query: str, *args: Any) -> asyncpg.Record | None: ...


class RequestRow(msgspec.Struct, frozen=True):
    """A row of `requests`; times in milliseconds, sizes in bytes, None for what is not known (yet)."""

    id: str
    created_at: datetime
    customer_id: str | None
    api_key_id: str | None
    tier: str | None
    model: str | None
    status: str
    error_code: str | None
    http_status: int | None
    completed_at: datetime | None
    latency_ms: float | None
    queue_ms: float | None
    gpu_ms: float | None
    batch_id: str | None
    batch_size: int | None
    worker_id: str | None
    gateway_id: str | None
    attempts: int | None
    tokens_used: int | None
    input_bytes: int | None
    output_bytes: int | None
    trace_id: str | None
    mode: str | None
    delivered: bool | None
    served_from: str | None = None


async def find_request(database: Queries, request_id: str) -> RequestRow | None:
    """The audit row of a request; None for an unknown id and for what is not an id. Raises what asyncpg raises."""
    try:
        moment = created_at(request_id)
    except (ValueError, OverflowError):
        return None
    row = await database.fetchrow(statement("find_request"), request_id, moment)
    return None if row is None else RequestRow(*row)


async def count_requests(database: Queries) -> dict[str, int]:
    """How many rows stand in each status that occurs. Reads the whole audit: for tests and checks."""
    return {row["status"]: row["count"] for row in await database.fetch(statement("count_requests"))}


USAGE_TIMEOUT_MS = 500
SPENT_TIMEOUT_MS = 60_000
CUSTOMERS_A_STEP = 2000
"""Customers counted in one statement: so many take no long turn of the loop."""

CHARGED_FAILURES = (ErrorCode.POISON_REQUEST, ErrorCode.INVALID_REQUEST, ErrorCode.CANCELLED)
"""Failures that are the client's own; as scheduler/lua/includes/repaying.lua, all others are given back."""


class Usage(msgspec.Struct, frozen=True):
    """Accepted requests of one customer in the last 24 hours; those that are neither completed nor failed are open."""

    requests: int
    completed: int
    failed: int
    tokens_used: int


class Spent(NamedTuple):
    """How many requests of a customer count in the present window of one of its quotas."""

    customer_id: str
    period: str  # Such as 1day.
    window_start: datetime
    requests: int


async def find_usage(connection: Connection, customer_id: str, *, timeout_ms: int = USAGE_TIMEOUT_MS) -> Usage:
    """The customer's last 24 hours; zeros for one that is not known.

    Raises what asyncpg raises, asyncpg.QueryCanceledError among it after `timeout_ms`.
    """
    async with _bounded(connection, timeout_ms):
        row = await connection.fetchrow(statement("customer_usage"), customer_id)
    return Usage(*row) if row is not None else Usage(0, 0, 0, 0)


async def quota_spent(
    connection: Connection,
    snapshot: Snapshot,
    *,
    now: datetime | None = None,
    timeout_ms: int = SPENT_TIMEOUT_MS,
) -> list[Spent]:
    """What every customer with quotas has spent of them in all pools, where it is more than nothing.

    `now` says which windows are the present ones (Redis' time; None: PostgreSQL's). A request counts in the window in
    which its id was made. Raises what asyncpg raises; `timeout_ms` is for each statement, which counts one period of
    some customers.
    """
    customers: dict[str, list[str]] = defaultdict(list)
    for customer in snapshot.customers.values():
        for period, _ in customer.quotas:
            customers[period].append(customer.id)
    charged = list(CHARGED_FAILURES)
    spent: list[Spent] = []
    async with _bounded(connection, timeout_ms):
        moment: datetime = await connection.fetchval(statement("moment")) if now is None else now
        for period, ids in customers.items():
            start, end = _window(period, moment)
            for first in range(0, len(ids), CUSTOMERS_A_STEP):
                some = ids[first : first + CUSTOMERS_A_STEP]
                rows = await connection.fetch(statement("quota_spent"), start, end, some, charged)
                spent.extend(Spent(customer_id, period, start, requests) for customer_id, requests in rows)
    return spent


def _window(period: str, now: datetime) -> tuple[datetime, datetime]:
    number = window_number(period, now)
    return window_start(period, number), window_start(period, number + 1)


@asynccontextmanager
async def _bounded(connection: Connection, timeout_ms: int) -> AsyncIterator[None]:
    """A read-only transaction whose statements may each take so long."""
    async with connection.transaction(readonly=True):
        await connection.execute(statement("limit_statements"), timeout_ms)
        yield
