"""Pages of a list: the parameters of a query, and OpenAI's form of a page."""

from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from gateway.http.validation import invalid

T = TypeVar("T")
Listed = TypeVar("Listed", bound="ListItem")


class ListItem(Protocol):
    """An item of a list."""

    @property
    def id(self) -> str:
        """Where the next page begins, after this item."""


class ObjectList(msgspec.Struct, Generic[T], gc=False):
    """A page."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def page_of(items: Sequence[Listed], limit: int) -> ObjectList[Listed]:
    """A page of `limit` items, of which one more may have been read."""
    shown = list(items[:limit])
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return ObjectList(shown, first, last, len(items) > limit)


class PageQuery(NamedTuple):
    """What part of a list is requested."""

    after: str
    limit: int
    oldest_first: bool


def read_page(query: Any, default: int, most: int) -> PageQuery:
    """Read `limit`, `after` and `order` of a query. Raises RequestError that names the parameter."""
    limit, order, after = query.get("limit", str(default)), query.get("order", "desc"), query.get("after", "")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise invalid("limit", f"`limit` must be 1 to {most}.")
    if order not in ("asc", "desc"):
        raise invalid("order", "`order` must be `asc` or `desc`.")
    if not (after.isascii() and after.isprintable()):
        raise invalid("after", "`after` must be the id of the last item of the page before.")
    return PageQuery(after, int(limit), order == "asc")
