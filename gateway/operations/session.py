"""The cookie of somebody who has shown the service token: it says until when, signed, and nothing of the token. Pure.

Every gateway with the same service token knows it, none keeps it; another token ends all sessions.
"""

import hmac
from hashlib import sha256

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
