"""Calls from pages of other origins (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol), to the API of customers only.

A page sends its key itself, so cookies are never asked for (no Access-Control-Allow-Credentials). Errors carry the
headers as well: without them a page could not read what went wrong.
"""

import re
from collections.abc import Collection, Sequence

from multidict import CIMultiDictProxy

from gateway.host_lists import ANY
from gateway.http.response import HttpResponse
from gateway.openapi.model import HEADER_NAMES

CUSTOMERS = ("/v1/", "/v2/", "/api/")
"""Where the addresses of the API begin; `/internal/` and what probes and Prometheus read are none."""

MAX_AGE_S = 7200  # Browsers keep the answer to a preflight no longer than this.
_OF_PAGES = {"Set-Cookie", "Content-Security-Policy", "X-Content-Type-Options", "Referrer-Policy", "Cache-Control"}
EXPOSED = tuple(name for name in HEADER_NAMES if name not in _OF_PAGES)
"""What a page may read of an answer, beside what any page may."""

ALLOWED = (
    "Authorization",
    "Content-Type",
    "Accept",
    "Idempotency-Key",
    "Prefer",
    "traceparent",
    "tracestate",
    "User-Agent",
    "OpenAI-Organization",
    "OpenAI-Project",
    "OpenAI-Beta",
)
"""What a page may send, beside `x-stainless-*`, by which OpenAI's clients describe themselves."""

_STAINLESS = re.compile(r"x-stainless-[a-z0-9-]{1,40}")
MOST_ASKED = 64  # Names in Access-Control-Request-Headers that are looked at.


class Preflight(HttpResponse):
    """An answer without a body, and without a length of it, as 204 has it."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(204, b"")

    def length(self) -> str:
        """None."""
        return ""


class Cors:
    """The headers for these origins: as browsers send them, or `*` alone."""

    def __init__(self, origins: Sequence[str]) -> None:
        expose = f"Access-Control-Expose-Headers: {', '.join(EXPOSED)}\r\n"
        self._any = f"Access-Control-Allow-Origin: *\r\n{expose}" if ANY in origins else ""
        self._lines = {
            origin: f"Access-Control-Allow-Origin: {origin}\r\nVary: Origin\r\n{expose}" for origin in origins
        }

    def lines(self, headers: CIMultiDictProxy[str]) -> str:
        """The header lines of an answer to a request with these headers."""
        named = headers.getall("Origin", ())
        if self._any:
            return self._any if named else ""
        # Caches have to know that another origin gets other headers, whoever asks first.
        return self._lines.get(named[0] if len(named) == 1 else "", "Vary: Origin\r\n")

    def preflight(
        self, headers: CIMultiDictProxy[str], methods: Collection[str], request_id: str
    ) -> HttpResponse | None:
        """The answer to a browser that asks before it sends a page's request; None where it is none, or may not."""
        if "Access-Control-Request-Method" not in headers or "Allow-Origin" not in self.lines(headers):
            return None
        answer = Preflight()
        answer.headers = [
            ("x-request-id", request_id),
            ("Access-Control-Allow-Methods", ", ".join(sorted(methods))),
            ("Access-Control-Allow-Headers", ", ".join((*ALLOWED, *_stainless(headers)))),
            ("Access-Control-Max-Age", str(MAX_AGE_S)),
        ]
        return answer


def serves_customers(path: str) -> bool:
    """Whether this path is one of the API of customers."""
    return path.startswith(CUSTOMERS)


def _stainless(headers: CIMultiDictProxy[str]) -> list[str]:
    """The names of that kind which the browser asks for, each spelled as it may be."""
    asked = headers.get("Access-Control-Request-Headers", "").lower().split(",")[:MOST_ASKED]
    return [name for each in asked if _STAINLESS.fullmatch(name := each.strip())]
