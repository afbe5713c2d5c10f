"""Pages of a list: the parameters of a query, and OpenAI's form of a page."""

import re
from collections.abc import Collection, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from multidict import MultiMapping

from gateway.http.validation import MAX_NAME_CHARACTERS, invalid

PAGE_PARAMETERS = ("limit", "after")
ANY_ID = "^[ -~]*$"
"""Of lists whose items have no ids of one form."""

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


def check_parameters(query: MultiMapping[str], known: Collection[str]) -> None:
    """Raises RequestError for a parameter that is not known or occurs twice, since it would have no effect.

    Not for lists of OpenAI's API: clients for Azure send `api-version` with each of them.
    """
    for name in query:
        if name not in known:
            shown, listed = (
                name[:MAX_NAME_CHARACTERS],
                f" The parameters are: {', '.join(sorted(known))}." if known else "",
            )
            raise invalid(shown, f"The parameter `{shown}` is not known here.{listed}")
        if len(query.getall(name)) > 1:
            raise invalid(name, f"The parameter `{name}` occurs twice.")


def read_page(query: Any, default: int, most: int, *, ids: str = ANY_ID) -> PageQuery:
    """Read `limit`, `after` and `order` of a query. Raises RequestError that names the parameter.

    `ids`: a pattern of the ids of the items and of "".
    """
    limit, order, after = query.get("limit", str(default)), query.get("order", "desc"), query.get("after", "")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise invalid("limit", f"`limit` must be 1 to {most}.")
    if order not in ("asc", "desc"):
        raise invalid("order", "`order` must be `asc` or `desc`.")
    if re.fullmatch(ids, after) is None:
        raise invalid("after", "`after` must be the id of the last item of the page before.")
    return PageQuery(after, int(limit), order == "asc")
