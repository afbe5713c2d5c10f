"""The route table, the drain state of a gateway, and its open connections by customer."""

import re
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import NamedTuple

from multidict import CIMultiDictProxy

from gateway.http.cors import serves_customers
from gateway.http.error_responses import ResponseForm
from gateway.http.parsed_request import ParsedRequest
from gateway.http.response import Headers, HttpResponse
from scheduler.errors import ErrorCode, RequestError

_SLASHES = re.compile("/{2,}")
_TWO_VERSIONS = re.compile(r".*/v[12](?=/v[12]/)", re.DOTALL)
TWO_VERSIONS = "The path has two versions, such as /v1/v1: remove /v1 from the end of the client's base URL."
EXTRA_SLASHES = "The path has two slashes in a row, or one at its end: remove them."
TWO_ENDPOINTS = "The path has two endpoints: remove %s from the end of the client's base URL."
AT_VERSION = "The path has two endpoints: remove %s from the end of the client's base URL, which then ends with /v1."
NEAR = "There is no resource at this path: did you mean %s? /docs lists all paths."
_MOST_COMPARED = 60  # Characters.
_LEAST_SIMILAR = 0.8  # 1: equal.
NO_VERSION = "The path lacks /v1: add it to the end of the client's base URL."


@dataclass(slots=True)
class RoutedRequest:
    """One HTTP request. `tail`: the path behind the prefix of its route. `arrived`: when its headers were read (monotonic s).

    `auxiliary`: as in HttpRequest.
    """

    request: ParsedRequest
    request_id: str
    tail: str = ""
    auxiliary: bool = False
    arrived: float = field(default_factory=time.monotonic)

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        return self.request.headers

    @property
    def remote(self) -> str | None:
        """The client's address."""
        return self.request.remote

    def occupy(self, customer_id: str) -> None:
        """Count the connection to this customer. Raises RequestError if it has too many."""
        self.request.protocol.occupy(customer_id)


Handler = Callable[[RoutedRequest], Awaitable[HttpResponse]]


class Route(NamedTuple):
    """A handler. `queued`: its requests join a queue, where admission limits them; other authenticated ones are auxiliary."""

    handler: Handler
    queued: bool


Methods = dict[str, Route]


class Router:
    """The route table. Exact paths are matched first, then prefixes.

    `/internal/requests/{id}` matches one path segment behind the prefix, `/v1/responses/{id}/cancel` one between two parts,
    `/v1/models/{id...}` any number. Behind `{id...}` a route may have a suffix: `/v2/models/{id...}/infer`.
    """

    def __init__(self) -> None:
        self._exact: dict[str, Methods] = {}
        self._prefixes: dict[str, Methods] = {}
        self._between: dict[tuple[str, str], Methods] = {}
        self._trees: dict[tuple[str, str], Methods] = {}  # By prefix and suffix; longer suffixes first.
        self._forms: dict[str, ResponseForm] = {}

    def add(self, method: str, path: str, handler: Handler, *, queued: bool = False) -> None:
        """Add a route."""
        route = Route(handler, queued)
        prefix, brace, name = path.partition("{")
        if "...}" in name:
            self._trees.setdefault((prefix, name.partition("...}")[2]), {})[method] = route
            self._trees = dict(sorted(self._trees.items(), key=lambda item: -len(item[0][1])))
        elif last := name.partition("}/")[2]:
            self._between.setdefault((prefix, last), {})[method] = route
        else:
            table = self._prefixes if brace else self._exact
            table.setdefault(prefix, {})[method] = route

    def set_form(self, path: str, form: ResponseForm) -> None:
        """Write the errors of this path, and of those below it, in this form."""
        self._forms[path] = form

    def form(self, raw_path: str) -> ResponseForm | None:
        """The form of errors of a path; None for OpenAI's."""
        path = path_of(raw_path)
        return next((form for top, form in self._forms.items() if path == top or path.startswith(f"{top}/")), None)

    def table(self) -> dict[str, set[str]]:
        """Every path, as it was added, with its methods."""
        found = dict(self._exact)
        found |= {f"{prefix}{{id}}": methods for prefix, methods in self._prefixes.items()}
        found |= {f"{prefix}{{id}}/{last}": methods for (prefix, last), methods in self._between.items()}
        found |= {f"{prefix}{{id...}}{suffix}": methods for (prefix, suffix), methods in self._trees.items()}
        return {path: set(methods) for path, methods in found.items()}

    def not_found(self, raw_path: str) -> RequestError:
        """The error of a path without a route, which names the mistake if the base URL of a client is the reason, or a similar path."""
        path = path_of(raw_path)
        two = _TWO_VERSIONS.match(path)
        if two is not None and self.find(path[two.end() :]):
            return RequestError(ErrorCode.NOT_FOUND, TWO_VERSIONS)
        if self.find(f"/v1{path}"):
            return RequestError(ErrorCode.NOT_FOUND, NO_VERSION)
        joined = _without_extra_slashes(path)
        if joined != path and self.find(joined):
            return RequestError(ErrorCode.NOT_FOUND, EXTRA_SLASHES)
        endpoints = [each for each in self._exact if serves_customers(each)]
        for first in endpoints:
            rest = path.removeprefix(first)
            if rest != path and rest.startswith("/v1/") and self.find(rest):
                return RequestError(ErrorCode.NOT_FOUND, TWO_ENDPOINTS % first)
            if rest != path and self.find(f"/v1{rest}"):
                return RequestError(ErrorCode.NOT_FOUND, AT_VERSION % first.removeprefix("/v1"))
        near = get_close_matches(path[:_MOST_COMPARED].lower(), endpoints, 1, _LEAST_SIMILAR)
        return RequestError(ErrorCode.NOT_FOUND, NEAR % near[0] if near else None)

    def find(self, raw_path: str) -> tuple[Methods, str] | None:
        """The methods of a path and its tail, or None. Query, scheme and host are ignored."""
        if methods := self._exact.get(raw_path):
            return methods, ""
        path = path_of(raw_path)
        if methods := self._exact.get(path):
            return methods, ""
        prefix, slash, tail = path.rpartition("/")
        methods = self._prefixes.get(prefix + slash)
        if methods and tail:
            return methods, tail
        before, slash, middle = prefix.rpartition("/")
        if middle and (methods := self._between.get((before + slash, tail))):
            return methods, middle
        for (prefix, suffix), methods in self._trees.items():
            end = len(path) - len(suffix)
            if path.startswith(prefix) and path.endswith(suffix) and end > len(prefix):
                return methods, path[len(prefix) : end]
        return None


def path_of(target: str) -> str:
    """The path of a request target, without its query, and without the scheme and host that clients send to a proxy.

    Slashes that clients add where they join a base URL with a path are left out, but only in the API of
    customers: a proxy may deny other paths by their beginning.
    """
    if not target.startswith("/"):
        _, slash, path = target.partition("://")[2].partition("/")
        target = slash + path
    path = target.partition("?")[0]
    if "//" in path or path.endswith("/"):
        joined = _without_extra_slashes(path)
        return joined if serves_customers(f"{joined}/") else path
    return path


def _without_extra_slashes(path: str) -> str:
    return _SLASHES.sub("/", path).rstrip("/")


def method_not_allowed(methods: Collection[str]) -> tuple[RequestError, Headers]:
    """The error of a path that accepts only these methods, and its headers."""
    listed = ", ".join(sorted(methods))
    message = f"This path does not accept this method, only {listed}."
    return RequestError(ErrorCode.METHOD_NOT_ALLOWED, message), [("Allow", listed)]


class DrainState:
    """The stage of the drain: open, leaving while the gateway still serves, then closed."""

    __slots__ = ("closed", "leaving")

    def __init__(self) -> None:
        # Not ready, but serving, until load balancers have noticed. Each response closes its connection, so that few
        # clients send a request on a connection that is just being closed.
        self.leaving = False
        self.closed = False  # New requests are rejected.


class CustomerConnections:
    """Open connections and gRPC calls of each customer at one gateway: at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[str, int] = {}  # Without zeros.

    def share(self) -> "ConnectionShare":
        """The share of one connection, which has no customer yet."""
        return ConnectionShare(self)

    def take(self, customer_id: str) -> None:
        """Raises RequestError 429 `too_many_connections` if the customer has as many as it may have."""
        held = self._held.get(customer_id, 0)
        if held >= self._most:
            raise RequestError(ErrorCode.TOO_MANY_CONNECTIONS)
        self._held[customer_id] = held + 1

    def give_back(self, customer_id: str) -> None:
        """Undo `take`."""
        self._held[customer_id] -= 1
        if not self._held[customer_id]:
            del self._held[customer_id]


class ConnectionShare:
    """One connection, counted to the customer of its last request: behind a proxy it has requests of several."""

    __slots__ = ("_counts", "_customer_id")

    def __init__(self, counts: CustomerConnections) -> None:
        self._counts: CustomerConnections | None = counts  # None: closed.
        self._customer_id = ""

    def occupy(self, customer_id: str) -> None:
        """Count the connection to this customer. Raises RequestError as `CustomerConnections.take`."""
        if customer_id == self._customer_id or self._counts is None:
            return
        self._counts.take(customer_id)
        if self._customer_id:
            self._counts.give_back(self._customer_id)
        self._customer_id = customer_id

    def close(self) -> None:
        """The connection is closed, and counts no more."""
        if self._counts is not None and self._customer_id:
            self._counts.give_back(self._customer_id)
        self._counts = None
