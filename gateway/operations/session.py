"""The dashboard session: its signed cookie, its authentication, and the check against cross-site requests.

The cookie contains its expiry time and a signature made with the service token, not the token itself. Every gateway with
the same token accepts it, and none stores it; a new token ends all sessions.

The cookie is `SameSite=Strict`, and JSON cannot be sent across origins without a preflight. `Sec-Fetch-Site` and `Origin`
are the third check, and the only one against other services on the same host name. Programs send neither header, so
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
    """The value of a new cookie. `now`: seconds since the epoch."""
    until = str(int(now) + LASTS_S)
    return f"{until}.{_signature(service_token, until)}"


def left_s(service_token: str, value: str, now: float) -> float:
    """Seconds until a cookie expires; 0 if it has expired or is not valid."""
    until, _, signature = value.partition(".")
    if not service_token or not (until.isascii() and until.isdigit() and len(until) <= 12):
        return 0.0
    if not hmac.compare_digest(signature.encode(), _signature(service_token, until).encode()):
        return 0.0
    return min(float(LASTS_S), max(0.0, int(until) - now))


def presented(cookies: str) -> str:
    """The value of the session cookie in a Cookie header, "" if there is none."""
    for pair in cookies.split(";"):
        name, _, value = pair.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def set_cookie(value: str, *, lasts_s: int, secure: bool) -> str:
    """The value of the Set-Cookie header. `secure`: the browser must send the cookie only over TLS."""
    return f"{COOKIE}={value}; Path={PATH}; Max-Age={lasts_s}; HttpOnly; SameSite=Strict" + (
        "; Secure" if secure else ""
    )


def _signature(service_token: str, until: str) -> str:
    key = hmac.digest(service_token.encode(), _PURPOSE, sha256)
    return hmac.new(key, until.encode(), sha256).hexdigest()


class SessionAuth:
    """Authenticates dashboard requests. `wall`: seconds since the epoch."""

    def __init__(self, service_token: str, authenticator: Authenticator, wall: Callable[[], float] = time.time) -> None:
        self._token = service_token
        self._authenticator = authenticator
        self._wall = wall

    def check(self, call: RoutedRequest) -> float:
        """Seconds for which the caller is authenticated. Raises RequestError without a valid cookie or token."""
        left = self.left_s(call)
        if not left:
            self._authenticator.check_service(call, self._token)
        return left or LASTS_S

    def issue(self, call: RoutedRequest) -> str:
        """The value of a new cookie. Raises RequestError for a wrong service token, which counts as failed authentication."""
        self._authenticator.check_service(call, self._token)
        return issue(self._token, self._wall())

    def left_s(self, call: RoutedRequest) -> float:
        """Seconds until the caller's cookie expires; 0 without a valid one."""
        return left_s(self._token, presented(call.headers.get("Cookie", "")), self._wall())


def check_same_site(headers: CIMultiDictProxy[str]) -> None:
    """Raises RequestError `cross_site` for a request of another page, or of a browser that does not name the page."""
    if fetch_sites := headers.getall("Sec-Fetch-Site", []):
        same = fetch_sites == ["same-origin"]
    elif origins := headers.getall("Origin", []):
        same = len(origins) == 1 and _host_and_port(origins[0]) == headers.get("Host", "").lower()
    else:
        same = "Authorization" in headers
    if not same:
        raise RequestError(ErrorCode.CROSS_SITE)


def _host_and_port(origin: str) -> str | None:
    """Host and port of an origin; None if it has none, such as `null`."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
