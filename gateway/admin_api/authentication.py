"""Authentication of operators: the token in `Authorization`, or the cookie of a browser's session."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from aiohttp import web

from gateway.auth.client_address import X_FORWARDED_FOR, Network, client_address, is_https
from gateway.auth.throttle import AuthThrottle
from gateway.http.errors import RejectionError
from ledger.admin.operators import Operator, find_operator, hash_of
from ledger.admin.sessions import LIFETIME_S, OperatorSession, find_session, session_hash
from ledger.postgres import Connection
from scheduler.errors import ErrorCode, RequestError

OVER_TLS = "__Host-"
"""The prefix of names of cookies that browsers accept and send over TLS only, and from this host only."""

NO_CACHE = ("Cache-Control", "no-store")
REQUEST_HEADER = "X-Tierlane-Request"
UNAUTHORIZED = (
    "The operator's token is not valid: send `Authorization: Bearer tlo_...`; "
    "check that it was copied whole, has not expired, and was not revoked."
)
ENDED = "The session has ended, or there was none: sign in."
NO_REQUEST_HEADER = f"A change with the cookie of a session needs the header `{REQUEST_HEADER}: 1`."


class CookieKind(NamedTuple):
    """A cookie without its value."""

    name: str
    lasts_s: int
    same_site: Literal["Strict", "Lax"]


SESSION_COOKIE = CookieKind("tierlane_admin_session", LIFETIME_S, "Strict")


class Credentials(NamedTuple):
    """The hash of a token, or that of a session."""

    hashed: bytes
    is_token: bool


class OperatorAuth:
    """Authenticates requests. `failures`: in the notation of `limits`, by address; "off": unlimited."""

    def __init__(self, failures: str, trusted_proxies: Sequence[Network]) -> None:
        self._throttle = None if failures == "off" else AuthThrottle(failures)
        self._trusted = trusted_proxies

    def credentials(self, request: web.Request) -> Credentials:
        """What the request is authenticated with, by its form and without a query. Raises RequestError."""
        cookie = self.cookie_hash(request)
        if "Authorization" not in request.headers and cookie is not None:
            if request.method != "GET":
                check_request_header(request)
            return Credentials(cookie, is_token=False)
        return Credentials(self.token_hash(request), is_token=True)

    def token_hash(self, request: web.Request) -> bytes:
        """The hash of the token. Raises RequestError where its form is wrong."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        hashed = hash_of(token.strip()) if scheme.lower() == "bearer" else None
        if hashed is None:
            raise self.failed(request)
        return hashed

    def cookie_hash(self, request: web.Request) -> bytes | None:
        """The hash of the session of the cookie, if there is one."""
        cookie = self.cookie(request, SESSION_COOKIE)
        return None if cookie is None else session_hash(cookie)

    async def operator(self, connection: Connection, request: web.Request, given: Credentials) -> Operator:
        """The operator with these credentials. Raises RequestError."""
        if not given.is_token:
            return (await live_session(connection, given.hashed)).operator
        operator = await find_operator(connection, given.hashed)
        if operator is None:
            raise self.failed(request)
        return operator

    def cookie(self, request: web.Request, kind: CookieKind) -> str | None:
        """The value of a cookie that `set_cookie` has set."""
        return request.cookies.get(f"{OVER_TLS * self.is_secure(request)}{kind.name}")

    def set_cookie(self, request: web.Request, response: web.Response, kind: CookieKind, value: str) -> None:
        """Set a cookie in a response, or delete it with an empty value. Over TLS it has the prefix."""
        secure = self.is_secure(request)
        response.set_cookie(
            f"{OVER_TLS * secure}{kind.name}",
            value,
            max_age=kind.lasts_s if value else 0,
            path="/",
            secure=secure or None,
            httponly=True,
            samesite=kind.same_site,
        )

    def is_secure(self, request: web.Request) -> bool:
        """Whether the browser sent the request over TLS."""
        forwarded = request.headers.getall("X-Forwarded-Proto", ())
        return request.secure or is_https(request.remote, forwarded, self._trusted)

    def failed(self, request: web.Request) -> RequestError:
        """The error for a failed authentication, which is counted by address."""
        forwarded = request.headers.getall(X_FORWARDED_FOR, ())
        address = client_address(request.remote, forwarded, self._trusted)
        wait_ms = None if self._throttle is None else self._throttle.failed(address)
        if wait_ms is None:
            return RequestError(ErrorCode.INVALID_API_KEY, UNAUTHORIZED)
        return RejectionError(ErrorCode.RATE_LIMIT_EXCEEDED, "Too many failed authentications.", wait_ms)


def check_request_header(request: web.Request) -> None:
    """Raises RequestError without the header that a page of another origin cannot send with a cookie."""
    if request.headers.getall(REQUEST_HEADER, []) != ["1"]:
        raise RequestError(ErrorCode.CROSS_SITE, NO_REQUEST_HEADER)


async def live_session(connection: Connection, hashed: bytes | None) -> OperatorSession:
    """The session with this hash. Raises RequestError; a page with an old cookie is no failed authentication."""
    found = None if hashed is None else await find_session(connection, hashed)
    if found is None:
        raise RequestError(ErrorCode.INVALID_API_KEY, ENDED)
    return found
