"""The verb `tierlane requests`: accepted requests in the audit."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from ledger.admin.changes import Row
from ledger.admin.errors import ChangeRejected
from ledger.postgres import Connection
from scheduler.errors import ErrorCode
from tierlane.admin.options import Work
from tierlane.admin.remote import find_customer, search_requests
from tierlane.admin.runner import show_rows
from tierlane.connect import UsageError
from tierlane.output import Column, named

COLUMNS = (
    Column("created_at", "CREATED"),
    Column("id", "REQUEST", whole=True),
    *named("customer", "model", "status"),
    Column("error_code", "CODE"),
    Column("http_status", "HTTP"),
    Column("latency_ms", "MS"),
    Column("worker_id", "WORKER"),
)


def show_requests(limit: int, customer: str | None, age: timedelta, **wanted: str | None) -> Work:
    """Print the newest requests of the last `age`, of one customer or of all; `wanted` are columns of FILTERS.

    Raises UsageError for an unknown error code.
    """
    code = wanted.get("error_code")
    if code not in (None, *ErrorCode):
        raise UsageError(f"--code: must be an error code, such as queue_timeout, got {code!r}")

    async def read(connection: Connection) -> tuple[list[Row], int | None]:
        owner = None if customer is None else (await find_customer(connection, customer))["id"]
        now = datetime.now(UTC)
        found = await search_requests(
            connection, limit + 1, now - age, now + timedelta(minutes=1), customer_id=owner, **wanted
        )
        names = await _names_of(connection, {row["customer_id"] for row in found[:limit]} - {None})
        rows = [row | {"customer": names.get(row["customer_id"])} for row in found[:limit]]
        return rows, None if len(found) > limit else 0

    return show_rows(read, COLUMNS, "requests")


async def _names_of(connection: Connection, ids: set[UUID]) -> dict[UUID, str]:
    """The names of customers; those that are deleted have their id."""
    names = {}
    for customer_id in ids:
        try:
            names[customer_id] = (await find_customer(connection, str(customer_id)))["name"]
        except ChangeRejected:
            names[customer_id] = str(customer_id)
    return names
