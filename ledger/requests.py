"""Reading the audit: one request by its id, which also says in which partition it is."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

import asyncpg
import msgspec

from ledger.statements import statement
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
