"""CORS (https://fetch.spec.whatwg.org/#http-cors-protocol) for the customer API.

A page sends its key itself, so cookies are never needed (no Access-Control-Allow-Credentials). Errors have the headers
too: without them a page could not read the error.
"""

import re
from collections.abc import Collection, Sequence

from multidict import CIMultiDictProxy

from gateway.host_lists import ANY
from gateway.http.response import HttpResponse
from gateway.http.response_headers import RESPONSE_HEADERS

CUSTOMERS = ("/v1/", "/v2/", "/api/")
"""Path prefixes of the customer API, which excludes `/internal/`, probes and metrics."""

MAX_AGE_S = 7200  # The longest time that browsers cache a preflight.
_OF_PAGES = {"Set-Cookie", "Content-Security-Policy", "X-Content-Type-Options", "Referrer-Policy", "Cache-Control"}
EXPOSED = tuple(name for name in RESPONSE_HEADERS if name not in _OF_PAGES)
"""Response headers that a page may read, besides those that it always may."""

ALLOWED = (
    "Authorization",
    "Content-Type",
    "Accept",
    "Idempotency-Key",
    "Inference-Header-Content-Length",
    "Prefer",
    "traceparent",
    "tracestate",
    "User-Agent",
    "OpenAI-Organization",
    "OpenAI-Project",
    "OpenAI-Beta",
    "x-api-key",
    "anthropic-version",
    "anthropic-beta",
    "anthropic-dangerous-direct-browser-access",
)
"""Request headers that a page may send, besides `x-stainless-*`, which OpenAI's clients send."""

_STAINLESS = re.compile(r"x-stainless-[a-z0-9-]{1,40}")
MAX_REQUESTED = 64  # Names in Access-Control-Request-Headers that are checked.


class Preflight(HttpResponse):
    """A 204, which has neither a body nor a length."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(204, b"")

    def length(self) -> str:
        """No header."""
        return ""


class Cors:
    """The CORS headers for these origins, or for all (`*`)."""

    def __init__(self, origins: Sequence[str]) -> None:
        expose = f"Access-Control-Expose-Headers: {', '.join(EXPOSED)}\r\n"
        self._any = f"Access-Control-Allow-Origin: *\r\n{expose}" if ANY in origins else ""
        self._lines = {
            origin: f"Access-Control-Allow-Origin: {origin}\r\nVary: Origin\r\n{expose}" for origin in origins
        }

    def lines(self, headers: CIMultiDictProxy[str]) -> str:
        """The header lines of a response to a request with these headers."""
        named = headers.getall("Origin", ())
        if self._any:
            return self._any if named else ""
        # Caches must store a response per origin.
        return self._lines.get(named[0] if len(named) == 1 else "", "Vary: Origin\r\n")

    def preflight(
        self, headers: CIMultiDictProxy[str], methods: Collection[str], request_id: str
    ) -> HttpResponse | None:
        """The response to a preflight request; None if it is not one, or the origin is not allowed."""
        if "Access-Control-Request-Method" not in headers or "Allow-Origin" not in self.lines(headers):
            return None
        requested = headers.get("Access-Control-Request-Headers", "").lower().split(",")[:MAX_REQUESTED]
        stainless = [name for each in requested if _STAINLESS.fullmatch(name := each.strip())]
        response = Preflight()
        response.headers = [
            ("x-request-id", request_id),
            ("Access-Control-Allow-Methods", ", ".join(sorted(methods))),
            ("Access-Control-Allow-Headers", ", ".join((*ALLOWED, *stainless))),
            ("Access-Control-Max-Age", str(MAX_AGE_S)),
        ]
        return response


def serves_customers(path: str) -> bool:
    """Whether the path belongs to the customer API."""
    return path.startswith(CUSTOMERS)
