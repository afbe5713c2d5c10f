"""Queries on the audit: one request by its id, and the usage of customers.

The audit lags by up to two seconds, so admission does not use it.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import msgspec

from ledger.alerts import CustomerAlert, customer_alerts
from ledger.postgres import Connection, statement
from scheduler.request_id import created_at

USAGE_TIMEOUT_MS = 500


class RequestRow(msgspec.Struct, frozen=True):
    """A row of `requests`. Times in milliseconds, sizes in bytes, None if unknown."""

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
    endpoint: str | None = None
    cost_ms: float | None = None


class Usage(msgspec.Struct, frozen=True):
    """Accepted requests of one customer in the last 24 hours. The difference to completed and failed is open.

    `as_of`: when they were counted, Unix seconds of PostgreSQL. `alerts`: the shares of quotas that it reached in their present periods.
    """

    requests: int
    completed: int
    failed: int
    tokens_used: int
    as_of: int
    alerts: list[CustomerAlert] = msgspec.field(default_factory=list)


class GpuShare(msgspec.Struct, frozen=True):
    """GPU milliseconds of one customer and of all customers, and its accepted requests, in one window."""

    gpu_ms: float
    total_gpu_ms: float
    requests: int
    completed: int
    failed: int


class FailedRequest(msgspec.Struct, frozen=True):
    """A request that was accepted and failed."""

    id: str
    created_at: datetime
    model: str | None
    error_code: str | None
    http_status: int | None


async def find_request(connection: Connection, request_id: str) -> RequestRow | None:
    """The audit row of a request; None for an unknown or invalid id. Raises what asyncpg raises."""
    try:
        created = created_at(request_id)  # Selects the partition.
    except (ValueError, OverflowError):
        return None
    row = await connection.fetchrow(statement("find_request"), request_id, created)
    return None if row is None else RequestRow(*row)


async def find_usage(connection: Connection, customer_id: str, *, timeout_ms: int = USAGE_TIMEOUT_MS) -> Usage:
    """The usage of a customer; zeros if it is unknown.

    Raises what asyncpg raises; asyncpg.QueryCanceledError after `timeout_ms`.
    """
    async with with_statement_timeout(connection, timeout_ms):
        (row,) = await connection.fetch(statement("customer_usage"), customer_id)
        alerts = await customer_alerts(connection, customer_id)
    requests, completed, failed, tokens_used, as_of = row
    return Usage(requests, completed, failed, tokens_used, as_of, alerts)


class UsageLine(NamedTuple):
    """The accepted requests of one customer, key and model; `day` is None for the whole time, `cost_usd` without a price."""

    day: date | None
    customer_id: str | None
    customer: str | None  # None: it was deleted.
    key_id: str | None
    model: str | None
    requests: int
    tokens: int
    gpu_s: Decimal
    cost_usd: Decimal | None


async def usage_lines(
    connection: Connection, first: date, last: date, *, daily: bool, customer_id: UUID | None = None
) -> AsyncIterator[UsageLine]:
    """The usage of the days `first..last` of UTC, of one customer or of all, read in parts.

    Needs a transaction; raises what asyncpg raises.
    """
    days = (last - first).days + 1
    for begin, count in ((first + timedelta(n), 1) for n in range(days)) if daily else ((first, days),):
        start = datetime.combine(begin, time(), UTC)
        query = connection.cursor(statement("usage_export"), start, start + timedelta(count), customer_id, prefetch=500)
        async for row in query:
            yield UsageLine._make((begin if daily else None, *row))


class UsagePart(NamedTuple):
    """The accepted requests of one customer in a group: a day, a model or a key. `cost_usd` is None without a price."""

    part: str
    requests: int
    tokens: int
    gpu_s: float
    cost_usd: float | None


async def usage_by(
    connection: Connection,
    customer_id: str,
    days: tuple[date, date],
    by: str,
    *,
    after: str,
    limit: int,
    timeout_ms: int,
) -> list[UsagePart]:
    """The first `limit` groups behind `after` of the usage in the days of UTC from the first to the last one.

    `by`: day, model or key. Raises as `find_usage`.
    """
    begin, end = datetime.combine(days[0], time(), UTC), datetime.combine(days[1], time(), UTC) + timedelta(1)
    async with with_statement_timeout(connection, timeout_ms):
        rows = await connection.fetch(statement("customer_usage_by"), customer_id, begin, end, by, after, limit)
    return [UsagePart._make(row) for row in rows]


class RecordedRequest(NamedTuple):
    """What a simulation reads of a row of `requests`. Times in milliseconds, None if unknown."""

    created_at: datetime
    customer_id: str | None
    status: str
    error_code: str | None
    tokens_used: int | None
    input_bytes: int | None
    latency_ms: float | None
    queue_ms: float | None
    gpu_ms: float | None
    batch_id: str | None
    batch_size: int | None
    worker_id: str | None


async def recorded_requests(
    connection: Connection, begin: datetime, end: datetime, models: Sequence[str]
) -> AsyncIterator[RecordedRequest]:
    """The requests of these models from `begin` to before `end`, in order. Needs a transaction; raises what asyncpg raises."""
    async for row in connection.cursor(statement("recorded_requests"), begin, end, models, prefetch=5000):
        yield RecordedRequest._make(row)


class RecentWorker(NamedTuple):
    """A worker that ran accepted requests in a window, their number, and the creation time of the newest."""

    worker: str
    requests: int
    last_request_at: datetime


async def recent_workers(connection: Connection, window_s: int, *, timeout_ms: int) -> list[RecentWorker]:
    """The workers that ran requests of the last `window_s` seconds, at most an hour, by id. Raises as `find_usage`."""
    async with with_statement_timeout(connection, timeout_ms):
        rows = await connection.fetch(statement("recent_workers"), await _first_id(connection, window_s))
    return [RecentWorker._make(row) for row in rows]


async def _first_id(connection: Connection, window_s: int) -> str:
    """The lowest id of a request of the last `window_s` seconds."""
    now: datetime = await connection.fetchval(statement("clock_timestamp"))
    return f"req_{max(0, int((now.timestamp() - window_s) * 1000)):012x}"


async def find_gpu_share(
    connection: Connection,
    customer_id: str,
    window_s: int,
    *,
    tier: str | None = None,
    timeout_ms: int = USAGE_TIMEOUT_MS,
) -> GpuShare:
    """The share of a customer in the GPU time of the last `window_s` seconds, of one tier or all. Raises as `find_usage`."""
    async with with_statement_timeout(connection, timeout_ms):
        first_id = await _first_id(connection, window_s)
        row = await connection.fetchrow(statement("customer_gpu_share"), customer_id, first_id, tier)
    return GpuShare(*row) if row is not None else GpuShare(0.0, 0.0, 0, 0, 0)


async def find_failed(
    connection: Connection, customer_id: str, limit: int, *, timeout_ms: int = USAGE_TIMEOUT_MS
) -> list[FailedRequest]:
    """The newest failed requests of a customer in the last hour. Raises as `find_usage`."""
    async with with_statement_timeout(connection, timeout_ms):
        rows = await connection.fetch(statement("customer_errors"), customer_id, limit)
    return [FailedRequest(*row) for row in rows]


@asynccontextmanager
async def with_statement_timeout(connection: Connection, timeout_ms: int) -> AsyncIterator[None]:
    """A read-only transaction with a timeout for each statement."""
    async with connection.transaction(readonly=True):
        await connection.execute(statement("set_statement_timeout"), timeout_ms)
        yield
