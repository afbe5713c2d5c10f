"""Search in the audit: requests of a time by customer, tier, model, status and error code. Raises what asyncpg raises."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import and_, or_, select

from ledger.admin.changes import Row, fetch
from ledger.postgres import Connection
from ledger.schema.audit import requests
from scheduler.request_id import created_at

FILTERS = ("tier", "model", "status", "error_code", "api_key_id")
"""Columns that are compared with a value."""


async def search_requests(
    connection: Connection,
    /,
    limit: int,
    since: datetime,
    until: datetime,
    *,
    customer_id: UUID | None = None,
    after: str | None = None,
    **wanted: str | None,
) -> list[Row]:
    """The newest `limit` requests from `since` to before `until`, of the values of FILTERS in `wanted`.

    `after`: those that follow this request in the order of the list. Raises ValueError if it is not a request id.
    """
    column = requests.c
    conditions: list[Any] = [column.created_at >= since, column.created_at < until]
    conditions += [] if customer_id is None else [column.customer_id == customer_id]
    conditions += [column[name] == wanted[name] for name in FILTERS if wanted.get(name) is not None]
    if after is not None:
        then = created_at(after)
        conditions.append(column.created_at <= then)  # For the choice of partitions.
        conditions.append(or_(column.created_at < then, and_(column.created_at == then, column.id < after)))
    query = select(requests).where(*conditions).order_by(column.created_at.desc(), column.id.desc())
    return await fetch(connection, query.limit(limit))
