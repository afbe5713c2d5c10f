"""Usage, requests and changes of the configuration."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec

from gateway.admin_api.bodies import Page, row_type
from gateway.admin_api.customers import OF_CUSTOMER
from gateway.admin_api.route import DURATION, PAGES, AdminCall, AdminResult, read_route
from gateway.http.validation import invalid
from gateway.openapi.model import Parameter
from gateway.openapi.schemas import NOT_EMPTY, only
from ledger.admin.errors import THINGS
from ledger.admin.requests import FILTERS, search_requests
from ledger.admin.rows import find_customer, list_config_changes
from ledger.admin.values import DAY, day_of, duration_of, time_of
from ledger.audit.queries import UsageLine, find_request, usage_lines, with_statement_timeout
from ledger.schema.audit import STATES, requests
from scheduler.errors import ErrorCode, RequestError

USAGE_TIMEOUT_MS = 60_000
"""Of one statement, which reads a day, or with `by=total` all days."""

MOST_DAYS = 366
DEFAULT_TIME = timedelta(days=1)
BY = ("day", "total")
TABLES = (*THINGS, "dead_letters")
_DAY = {"type": "string", "format": "date", "pattern": f"^{DAY}$"}
_REQUEST = {"id": "The id of the request."}

AuditRow = row_type("AuditRow", requests)
"""The type of a request as it is returned, for the description."""


class UsageRow(msgspec.Struct):
    """Accepted requests of one customer, key and model; `day` is null for the whole time, `cost_usd` without a price."""

    day: date | None
    customer_id: str | None
    customer: str | None
    key_id: str | None
    model: str | None
    requests: int
    tokens: int
    gpu_s: float
    cost_usd: float | None


class ConfigChange(msgspec.Struct):
    """A change of a row: who changed it from what to what. `customer`: its owner."""

    id: int
    changed_at: datetime
    changed_by: str
    table_name: str
    row_key: str
    old: dict[str, Any] | None
    new: dict[str, Any] | None
    customer: str | None


async def get_usage(call: AdminCall) -> AdminResult:
    """As `tierlane usage export`; `after` is the number of rows before the part."""
    first, last = (day_of(name, call.query.get(name, "")) for name in ("from", "to"))
    if not 0 <= (last - first).days < MOST_DAYS:
        raise invalid("to", f"`to` must not be before `from`, and less than {MOST_DAYS} days after it.")
    daily, customer = call.choice("by", BY) != "total", call.query.get("customer")
    after = call.query.get("after", "0")
    if not (after.isascii() and after.isdigit() and len(after) < 10):
        raise invalid("after", "`after` must be the `next` of the part before.")
    owner = None if customer is None else (await find_customer(call.connection, customer))["id"]
    start, rows = int(after), list[dict[str, Any]]()
    async with with_statement_timeout(call.connection, USAGE_TIMEOUT_MS):
        number = 0
        async for line in usage_lines(call.connection, first, last, daily=daily, customer_id=owner):
            number += 1
            if number > start:
                rows.append({name: _plain(value) for name, value in zip(UsageLine._fields, line, strict=True)})
            if len(rows) > call.limit:
                break
    return AdminResult({"data": rows[: call.limit], "next": str(start + call.limit) if rows[call.limit :] else None})


def _plain(value: Any) -> Any:
    """Without zeros after the last digit of a sum."""
    return value.normalize() if isinstance(value, Decimal) else value


async def get_requests(call: AdminCall) -> AdminResult:
    now = datetime.now(UTC)
    until = time_of("to", call.query["to"]) if "to" in call.query else now + timedelta(minutes=1)
    since = time_of("from", call.query["from"]) if "from" in call.query else min(until, now) - DEFAULT_TIME
    customer = call.query.get("customer")
    owner = None if customer is None else (await find_customer(call.connection, customer))["id"]
    call.choice("status", STATES)
    wanted = {name: call.query.get(name) for name in FILTERS}
    if wanted["error_code"] not in (None, *ErrorCode):
        raise invalid("error_code", "`error_code` must be one of those of docs/errors.md, such as queue_timeout.")
    after = call.query.get("after")
    try:
        rows = await search_requests(
            call.connection, call.limit + 1, since, until, customer_id=owner, after=after, **wanted
        )
    except ValueError as error:
        raise invalid("after", "`after` must be the id of a request.") from error
    return call.part(rows, lambda row: str(row["id"]))


async def get_request(call: AdminCall) -> AdminResult:
    row = await find_request(call.connection, call.path["id"])
    if row is None:
        raise RequestError(ErrorCode.NOT_FOUND, "There is no accepted request with this id.")
    return AdminResult(row)


async def get_config_changes(call: AdminCall) -> AdminResult:
    after, since = call.query.get("after"), call.query.get("since")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 19):
        raise invalid("after", "`after` must be the `next` of the part before.")
    rows, _ = await list_config_changes(
        call.connection,
        call.limit + 1,
        customer=call.query.get("customer"),
        since=None if since is None else duration_of("since", since),
        table=call.choice("table", TABLES),
        by=call.query.get("by"),
        before=None if after is None else int(after),
    )
    return call.part(rows, lambda row: str(row["id"]))


ROUTES = [
    read_route(
        "/usage",
        "Requests, tokens, GPU seconds and cost by customer, key and model",
        get_usage,
        Page[UsageRow],
        query=(
            Parameter("from", "query", "First day, in UTC: YYYY-MM-DD.", _DAY, required=True),
            Parameter("to", "query", "Last day, in UTC; it is included.", _DAY, required=True),
            Parameter("by", "query", "Lines for each day, or for the whole time.", only(*BY) | {"default": "day"}),
            OF_CUSTOMER,
            *PAGES,
        ),
    ),
    read_route(
        "/requests",
        "Search accepted requests in the audit, the newest first",
        get_requests,
        Page[AuditRow],  # type: ignore[valid-type]
        query=(
            OF_CUSTOMER,
            Parameter("from", "query", "First time; default: a day before the end.", NOT_EMPTY),
            Parameter("to", "query", "Before this time; default: now.", NOT_EMPTY),
            *(Parameter(name, "query", requests.c[name].comment or "", NOT_EMPTY) for name in FILTERS),
            *PAGES,
        ),
    ),
    read_route("/requests/{id}", "Show a request of the audit", get_request, AuditRow, parts=_REQUEST),
    read_route(
        "/config-changes",
        "List who changed which row from what to what, the newest first",
        get_config_changes,
        Page[ConfigChange],
        query=(
            OF_CUSTOMER,
            Parameter(
                "since",
                "query",
                "Only changes of this time, such as 24h or 7d.",
                {"type": "string", "pattern": DURATION},
            ),
            Parameter("table", "query", "Only rows of this table.", only(*TABLES)),
            Parameter("by", "query", "Only changes of this actor, or of the operator with this name.", NOT_EMPTY),
            *PAGES,
        ),
    ),
]
