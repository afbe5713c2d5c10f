"""The dashboard session: the signed cookie, who may use the dashboard, and the check against cross-site actions.

The cookie says until when it is valid, signed with the service token, and contains nothing of it. Every gateway with
the same token knows it, none stores it; another token ends all sessions.

The cookie is `SameSite=Strict`, and JSON cannot be sent across origins without a preflight; `Sec-Fetch-Site` and
`Origin` are the third check, and the only one against other programs on the same host name. Programs send neither, so
they must send the service token.
"""

import hmac
import time
from collections.abc import Callable
from hashlib import sha256
from urllib.parse import urlsplit

from multidict import CIMultiDictProxy

from gateway.auth.authenticator import Authenticator
from gateway.http.router import RoutedRequest
from scheduler.errors import ErrorCode, RequestError

COOKIE = "tierlane_session"
PATH = "/internal/dashboard"
LASTS_S = 12 * 3600
_PURPOSE = b"tierlane dashboard session 1"


def issue(service_token: str, now: float) -> str:
    """The value of a cookie that holds from now on; `now` is seconds since the epoch."""
    until = str(int(now) + LASTS_S)
    return f"{until}.{_signature(service_token, until)}"


def left_s(service_token: str, value: str, now: float) -> float:
    """Seconds that a cookie holds still; 0 where it does not, or is none of ours."""
    until, _, signature = value.partition(".")
    if not service_token or not (until.isascii() and until.isdigit() and len(until) <= 12):
        return 0.0
    if not hmac.compare_digest(signature.encode(), _signature(service_token, until).encode()):
        return 0.0
    return min(float(LASTS_S), max(0.0, int(until) - now))


def presented(cookies: str) -> str:
    """Our cookie's value in a Cookie header, "" where it is not there."""
    for pair in cookies.split(";"):
        name, _, value = pair.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def set_cookie(value: str, *, lasts_s: int, secure: bool) -> str:
    """The Set-Cookie header's value. `secure`: the browser came by TLS, and must not send it any other way."""
    return f"{COOKIE}={value}; Path={PATH}; Max-Age={lasts_s}; HttpOnly; SameSite=Strict" + (
        "; Secure" if secure else ""
    )


def _signature(service_token: str, until: str) -> str:
    key = hmac.digest(service_token.encode(), _PURPOSE, sha256)
    return hmac.new(key, until.encode(), sha256).hexdigest()


class SessionAuth:
    """The check of one gateway. `wall` is seconds since the epoch."""

    def __init__(self, service_token: str, authenticator: Authenticator, wall: Callable[[], float] = time.time) -> None:
        self._token = service_token
        self._authenticator = authenticator
        self._wall = wall

    def check(self, call: RoutedRequest) -> float:
        """Seconds that the caller may look. Raises RequestError for who has neither cookie nor token."""
        left = self.left_s(call)
        if not left:
            self._authenticator.check_service(call, self._token)
        return left or LASTS_S

    def issue(self, call: RoutedRequest) -> str:
        """A cookie's value for who sends the token. Raises RequestError; wrong tokens have to wait as at every door."""
        self._authenticator.check_service(call, self._token)
        return issue(self._token, self._wall())

    def left_s(self, call: RoutedRequest) -> float:
        """Seconds that the caller's cookie holds still; 0 without one."""
        return left_s(self._token, presented(call.headers.get("Cookie", "")), self._wall())


OURS = ["same-origin"]


def check_same_site(headers: CIMultiDictProxy[str]) -> None:
    """Raises RequestError `cross_site` for what another page sent, or a browser that does not say which page did."""
    if not _is_ours(headers):
        raise RequestError(ErrorCode.CROSS_SITE)


def _is_ours(headers: CIMultiDictProxy[str]) -> bool:
    fetched_from = headers.getall("Sec-Fetch-Site", [])
    if fetched_from:
        return fetched_from == OURS
    origins = headers.getall("Origin", [])
    if origins:
        return len(origins) == 1 and _place(origins[0]) == headers.get("Host", "").lower()
    return "Authorization" in headers


def _place(origin: str) -> str | None:
    """Host and port of an origin; None where it is none, such as `null`."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
