"""The one place that writes rate-limit headers: IETF draft 11 and the form that OpenAI's clients read.

A token bucket of `burst` tokens refilled at `rate` a second is announced as a quota of `burst` in the time that a
full refill takes; "reset" is the time until the bucket is full again, not the time until one more request fits.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from gateway.answer import Headers

POLICY = "requests"


class RateState(NamedTuple):
    """The effective limit of a key now: rate in requests/s, bucket size, what is left, milliseconds until full."""

    rate: float
    burst: float
    remaining: float
    reset_ms: int


def rate_headers(state: RateState) -> Headers:
    """The headers for `state`; `remaining` is cut to whole requests within 0 and the limit."""
    limit, policy = _limit_and_policy(state.rate, state.burst)
    remaining = max(0, min(limit, int(state.remaining)))
    reset_ms = max(0, state.reset_ms)
    return [
        ("RateLimit-Policy", policy),
        ("RateLimit", f'"{POLICY}";r={remaining};t={math.ceil(reset_ms / 1000)}'),
        ("x-ratelimit-limit-requests", str(limit)),
        ("x-ratelimit-remaining-requests", str(remaining)),
        ("x-ratelimit-reset-requests", go_duration(reset_ms)),
    ]


@lru_cache(maxsize=1024)
def _limit_and_policy(rate: float, burst: float) -> tuple[int, str]:
    limit = max(1, int(burst))
    window_s = max(1, math.ceil(burst / rate)) if rate > 0 else 1
    return limit, f'"{POLICY}";q={limit};w={window_s}'


def go_duration(milliseconds: int) -> str:
    """A duration as Go prints it and OpenAI sends it: `12ms`, `1s`, `1.5s`, `6m0s`, `1h0m0s`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if minutes < 60:
        return f"{minutes}m{seconds}" if minutes else seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}"
