"""The route table and the drain state of a gateway.

Exact paths are matched first, then prefixes whose rest is one path segment, or any. The drain state is open, then
leaving while the gateway still serves, then closed.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from multidict import CIMultiDictProxy

from gateway.http.response import HttpResponse


@dataclass(slots=True)
class RoutedRequest:
    """One HTTP request on its way through a handler.

    `tail` is what follows a prefix route's prefix, `arrived` when its headers were read, in monotonic seconds.
    """

    request: web.BaseRequest
    request_id: str
    tail: str = ""
    arrived: float = field(default_factory=time.monotonic)

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The request's headers."""
        return self.request.headers

    @property
    def remote(self) -> str | None:
        """The client's address."""
        return self.request.remote


Handler = Callable[[RoutedRequest], Awaitable[HttpResponse]]
Methods = dict[str, Handler]


class Router:
    """The table of addresses. `add("GET", "/internal/requests/{id}", handler)` makes a prefix route.

    With `{id...}` the rest may hold slashes: models are named like that.
    """

    def __init__(self) -> None:
        self._exact: dict[str, Methods] = {}
        self._prefixes: dict[str, Methods] = {}
        self._trees: dict[str, Methods] = {}

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Answer `method` on `path`; one that ends in `/{id}` takes any one segment there, in `/{id...}` any more."""
        prefix, brace, name = path.partition("{")
        prefixes = self._trees if name.endswith("...}") else self._prefixes
        table = prefixes if brace else self._exact
        table.setdefault(prefix, {})[method] = handler

    def table(self) -> dict[str, set[str]]:
        """Every path, as it was added, with its methods."""
        ends = ((self._exact, ""), (self._prefixes, "{id}"), (self._trees, "{id...}"))
        return {prefix + end: set(methods) for table, end in ends for prefix, methods in table.items()}

    def find(self, raw_path: str) -> tuple[Methods, str] | None:
        """The methods of a path and its tail, or None when there is nothing. Query, scheme and host are ignored."""
        if methods := self._exact.get(raw_path):
            return methods, ""
        path = path_of(raw_path)
        if methods := self._exact.get(path):
            return methods, ""
        prefix, slash, tail = path.rpartition("/")
        methods = self._prefixes.get(prefix + slash)
        return (methods, tail) if methods and tail else self._in_trees(path)

    def _in_trees(self, path: str) -> tuple[Methods, str] | None:
        for prefix, methods in self._trees.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods, path[len(prefix) :]
        return None


def path_of(target: str) -> str:
    """The path of a request target: without a query, nor the scheme and host that a client sends to a proxy."""
    if not target.startswith("/"):
        _, slash, path = target.partition("://")[2].partition("/")
        target = slash + path
    return target.partition("?")[0]


class DrainState:
    """Set by the drain; read by readiness, the edge and the handlers."""

    __slots__ = ("closed", "leaving")

    def __init__(self) -> None:
        # Not ready any more, but serving: load balancers need a moment to notice. Every answer ends its connection, so
        # that few clients are left to ask on a connection that closes at that moment.
        self.leaving = False
        self.closed = False  # New requests are refused.
