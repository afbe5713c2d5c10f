"""A route of the admin API, the call that its handler gets, and the result that it returns."""

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import Table

from gateway.admin_api.bodies import Changed
from gateway.admin_api.roles import Action
from gateway.http.validation import invalid
from gateway.openapi.model import Parameter
from gateway.openapi.schemas import NOT_EMPTY
from ledger.admin.changes import HIDDEN, Change, Row, find
from ledger.admin.operators import Operator
from ledger.admin.values import SPAN, duration_of
from ledger.postgres import Connection
from scheduler.errors import ErrorCode, RequestError

PREFIX = "/admin/v1"
DEFAULT_LIMIT, MOST_ROWS = 100, 1000
VOLATILE = frozenset({"last_used_at"})
"""Columns that are written while nobody changes the row; they are not part of its ETag."""

LIMIT = Parameter(
    "limit",
    "query",
    "Most rows to return.",
    {"type": "integer", "minimum": 1, "maximum": MOST_ROWS, "default": DEFAULT_LIMIT},
)
DURATION = f"^{SPAN}$"
AFTER = Parameter("after", "query", "`next` of the part before.", NOT_EMPTY)
PAGES = (LIMIT, AFTER)
_encode = msgspec.json.Encoder().encode


class AdminResult(NamedTuple):
    """A document and the ETag of the row that it shows."""

    document: object
    etag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminCall:
    """A request of an operator. `values`: the fields of the body that were sent; `if_match`: the ETags of its header.

    `callback_secret`: the deployment's, empty without one.
    """

    connection: Connection
    operator: Operator
    path: Mapping[str, str]
    query: Mapping[str, str]
    values: Row
    dry_run: bool
    if_match: tuple[str, ...] | None
    callback_secret: bytes

    @property
    def limit(self) -> int:
        """The most rows to return. Raises RequestError."""
        text = self.query.get("limit", str(DEFAULT_LIMIT))
        if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MOST_ROWS):
            raise invalid("limit", f"`limit` must be an integer from 1 to {MOST_ROWS:,}.")
        return int(text)

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        """A parameter of the query with one of these values. Raises RequestError."""
        value = self.query.get(name)
        if value is not None and value not in allowed:
            raise invalid(name, f"`{name}` must be {' or '.join(allowed)}.")
        return value

    def duration(self, name: str) -> timedelta | None:
        """A field of the body with a duration. Raises BadValue."""
        text = self.values.get(name)
        return None if text is None else duration_of(name, text)

    def check(self, table: Table, row: Row) -> None:
        """Raises RequestError if the row is not the one that If-Match names. The row must be locked."""
        if self.if_match is not None and "*" not in self.if_match and etag_of(table, row) not in self.if_match:
            raise RequestError(ErrorCode.PRECONDITION_FAILED)

    async def lock(self, table: Table, key: object) -> Row:
        """The row with this primary key, locked. Raises MissingRow, and RequestError as `check` does."""
        row = await find(self.connection, table, key)
        self.check(table, row)
        return row

    def changed(self, changes: Sequence[Change], table: Table | None = None, **secret: str) -> AdminResult:
        """The result of a change; `table`: of the row that is the last change, whose new ETag is returned.

        `secret`: the name and the text of a new key or token.
        """
        document: dict[str, object] = {"dry_run": self.dry_run, "changes": [each._asdict() for each in changes]}
        document |= dict.fromkeys(secret) if self.dry_run else secret
        new = changes[-1].new if changes and table is not None else None
        return AdminResult(document, None if new is None or table is None else etag_of(table, new))

    def page(self, rows: Sequence[Row], key: Callable[[Row], str]) -> AdminResult:
        """A part of the rows of a whole list; `key`: the value of `after` that continues behind a row."""
        start = 0
        if (after := self.query.get("after")) is not None:
            start = next((n for n, row in enumerate(rows, 1) if key(row) == after), -1)
            if start < 0:
                raise invalid("after", "The row of `after` does not exist: begin with the first part again.")
        return self.part(rows[start : start + self.limit + 1], key)

    def part(self, rows: Sequence[Row], key: Callable[[Row], str]) -> AdminResult:
        """A part of a list, from its rows and, if there are more, one further row."""
        shown = list(rows[: self.limit])
        return AdminResult({"data": shown, "next": key(shown[-1]) if len(rows) > len(shown) else None})


Handler = Callable[[AdminCall], Awaitable[AdminResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminRoute:
    """An address with its method, the action by which roles are allowed, and its description.

    `fields`: with only these fields in the body, `action_of_fields` applies instead. `status`: of a success.
    `etag`: the response has the ETag of a row; a change can have If-Match.
    """

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    summary: str
    handler: Handler
    result: Any = Changed
    action: Action = Action.ADMINISTER
    fields: frozenset[str] = frozenset()
    action_of_fields: Action = Action.ADMINISTER
    body: type | None = None
    body_required: bool = True
    example: Mapping[str, Any] | None = None
    query: tuple[Parameter, ...] = ()
    status: int = 200
    etag: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)
    """Parts of the path: name -> description."""

    @property
    def least_action(self) -> Action:
        """The action of a request whatever its body."""
        return self.action_of_fields if self.fields else self.action

    def action_for(self, values: Row) -> Action:
        """The action of a request with these fields in its body."""
        return self.action_of_fields if values and values.keys() <= self.fields else self.action

    @property
    def may_change(self) -> bool:
        return self.method != "GET"


def read_route(path: str, summary: str, handler: Handler, result: Any, **fields: Any) -> AdminRoute:
    """A route that reads."""
    named = {"action": Action.READ} | fields
    return AdminRoute(method="GET", path=PREFIX + path, summary=summary, handler=handler, result=result, **named)


def change_route(
    method: Literal["POST", "PUT", "PATCH", "DELETE"], path: str, summary: str, handler: Handler, **fields: Any
) -> AdminRoute:
    """A route that changes a row, whose new ETag it returns unless it deletes the row or `etag` is False."""
    named = {"etag": method != "DELETE"} | fields
    return AdminRoute(method=method, path=PREFIX + path, summary=summary, handler=handler, **named)


def etag_of(table: Table, row: Row) -> str:
    """A strong ETag: the hash of the columns of a row that users may see and change."""
    values = [row[column.name] for column in table.c if column.name not in HIDDEN | VOLATILE]
    digest = sha256(_encode(values)).digest()[:12]
    return f'"{base64.urlsafe_b64encode(digest).decode()}"'
