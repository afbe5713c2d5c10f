"""`GET /v1/usage`: requests, tokens, GPU time and cost of the customer by day, model or key, from the audit.

A query may read millions of rows. It is bounded in days and in time, few run at a time, and results are kept for a moment.
"""

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal, NamedTuple

import msgspec

from gateway.api.cached_lookup import CachedLookup
from gateway.http.pages import PAGE_PARAMETERS, ObjectList, check_parameters, page_of, read_page
from gateway.http.validation import invalid
from ledger.audit.queries import UsagePart, usage_by
from ledger.catalog.snapshot import Identity
from ledger.postgres import closing, connect
from scheduler.errors import ErrorCode, RequestError

MOST_DAYS = 92
DEFAULT_DAYS = 30
PAGE = 100
KEPT_S = 10.0
TIMEOUT_MS = 5000
CONNECT_TIMEOUT_S = 1.0
AT_ONCE = 2
"""Queries of this gateway."""

GROUPS = ("day", "model", "key")
NOT_NOW = (
    "Usage cannot be read right now: the audit is not available, or has too many requests in these days; try again soon, "
    "or with fewer days."
)
_DAY = re.compile(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}", re.ASCII)


class UsageItem(msgspec.Struct, gc=False):
    """The accepted requests of one day, model or key; the other two are null. `cost_usd` is null without a price."""

    day: str | None
    model: str | None
    key_id: str | None
    requests: int
    tokens: int
    gpu_s: float
    cost_usd: float | None
    object: Literal["usage"] = "usage"

    @property
    def id(self) -> str:
        """The group."""
        return self.day or self.model or self.key_id or ""


class UsageQuery(NamedTuple):
    """What is requested: the days, both included, the groups, and the page."""

    first: date
    last: date
    by: str
    after: str
    limit: int


ReadUsage = Callable[[str, UsageQuery], Awaitable[list[UsagePart]]]
"""One more row than the page has, of a customer. Raises what asyncpg raises."""


def read_usage_query(query: Any, today: date) -> UsageQuery:
    """Read `from`, `to`, `by`, `after` and `limit`. Raises RequestError that names the parameter."""
    check_parameters(query, ("from", "to", "by", *PAGE_PARAMETERS))
    last = _day(query, "to", today)
    first = _day(query, "from", last - timedelta(DEFAULT_DAYS - 1))
    if first > last:
        raise invalid("from", "`from` must not be after `to`.")
    if (last - first).days >= MOST_DAYS:
        raise invalid("from", f"`from` and `to` must be at most {MOST_DAYS} days apart, both included.")
    by, page = query.get("by", "day"), read_page(query, PAGE, PAGE)
    if by not in GROUPS:
        raise invalid("by", f"`by` must be one of {', '.join(GROUPS)}.")
    if page.after and by == "day":
        _day(query, "after", first)
    return UsageQuery(first, last, by, page.after, page.limit)


def _day(query: Any, name: str, default: date) -> date:
    text = query.get(name)
    if text is None:
        return default
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise invalid(name, f"`{name}` must be a day in UTC as YYYY-MM-DD, such as 2026-11-01.")


class UsageReports:
    """Usage reports of all customers. `read`: None if the gateway has no PostgreSQL."""

    def __init__(self, read: ReadUsage | None) -> None:
        self._read = read
        self._lookup: CachedLookup[list[UsagePart]] = CachedLookup(
            NOT_NOW,
            keep_s=KEPT_S,
            timeout_s=CONNECT_TIMEOUT_S + TIMEOUT_MS / 1000 + 1.0,
            max_running=AT_ONCE,
        )

    async def page(self, query: Any, identity: Identity) -> ObjectList[UsageItem]:
        """A page of a report. Raises RequestError: a wrong parameter, or `catalog_unavailable`."""
        wanted = read_usage_query(query, datetime.now(UTC).date())
        read, customer_id = self._read, identity.customer_id
        if read is None:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW)
        found = await self._lookup.find(repr((customer_id, wanted)), lambda: read(customer_id, wanted))
        if found.value is None:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, found.problem)
        return page_of([_item(wanted.by, each) for each in found.value], wanted.limit)

    async def close(self) -> None:
        """End the queries that are under way."""
        await self._lookup.close()


def usage_reader(database_url: str) -> ReadUsage:
    """Reads from PostgreSQL on a connection of its own: people ask rarely, and a long query must not delay others."""

    async def read(customer_id: str, query: UsageQuery) -> list[UsagePart]:
        connection = await connect(
            database_url,
            name="tierlane-usage-api",
            connect_timeout_s=CONNECT_TIMEOUT_S,
            statement_timeout_ms=TIMEOUT_MS,
        )
        async with closing(connection):
            return await usage_by(
                connection,
                customer_id,
                (query.first, query.last),
                query.by,
                after=query.after,
                limit=query.limit + 1,
                timeout_ms=TIMEOUT_MS,
            )

    return read


def _item(by: str, row: UsagePart) -> UsageItem:
    day, model, key = (row.part if by == each else None for each in GROUPS)
    return UsageItem(day, model, key, row.requests, row.tokens, row.gpu_s, row.cost_usd)
