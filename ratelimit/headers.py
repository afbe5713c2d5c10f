"""Rate-limit headers: IETF draft 11, and the headers that OpenAI's clients read.

A token bucket of `size` units refilled at `rate` per second is announced as a quota of `size` in the time of a full refill;
"reset" is the time until the bucket is full again, not until the next request fits. The constant parts are built once for
each set of limits.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from ratelimit.limits import CONCURRENCY, Bucket, EffectiveLimits, RemainingLimits
from ratelimit.quotas import PERIOD_S, period_of, period_parts, quota_name, unit_of

MOST = 10**15 - 1
"""An integer of a structured field has at most 15 digits: with more, clients may ignore the whole field."""


class _Fixed(NamedTuple):
    """The constant parts of all responses with one set of limits; `lines` are complete header lines."""

    # Size, and the texts before the remaining units and the reset in headers of its own, and before the units in RateLimit.
    buckets: tuple[tuple[int, str, str, str], ...]
    quotas: tuple[tuple[str, int], ...]  # Name, and smallest parts in one of its unit.
    lines: str


def rate_headers(limits: EffectiveLimits, left: RemainingLimits) -> list[tuple[str, str]]:
    """The headers for `limits`; remaining units are whole numbers from 0 to the limit."""
    pairs = (line.partition(": ") for line in rate_lines(limits, left).splitlines())
    return [(name, value) for name, _, value in pairs]


def rate_lines(limits: EffectiveLimits, left: RemainingLimits) -> str:
    """The same as header lines with line ends."""
    fixed = _fixed(limits)
    levels, in_use, quotas_left = left
    lines, fields = fixed.lines, ""
    for (size, remaining, reset, field), (spare, reset_ms) in zip(fixed.buckets, levels, strict=True):
        units = _within(spare, size)
        lines = f"{lines}{remaining}{units}{reset}{go_duration(reset_ms)}\r\n"
        fields = f"{fields}{field}{units};t={_seconds(reset_ms)}"
    if most := limits.max_concurrency:
        fields = f'{fields}, "{CONCURRENCY}";r={_within(most - in_use, most)}'
    if quotas_left and len(quotas_left) == len(fixed.quotas):
        for (name, parts), (_, amount), (spare, reset_ms) in zip(fixed.quotas, limits.quotas, quotas_left, strict=True):
            fields = f'{fields}, "{name}";r={_within(spare, amount) // parts};t={_seconds(reset_ms)}'
    return f"{lines}{fields}\r\n"


def with_empty_bucket(headers: list[tuple[str, str]], bucket: Bucket, reset_ms: int) -> list[tuple[str, str]]:
    """The headers with the policy of one more bucket, in which nothing is left and which is full again in `reset_ms`."""
    name, size = bucket.kind.name, max(1, int(min(MOST, bucket.size)))
    added = {
        "RateLimit-Policy": f', "{name}";q={size};w={_window_s(bucket)}',
        "RateLimit": f', "{name}";r=0;t={_seconds(reset_ms)}',
    }
    return [(header, value + added.get(header, "")) for header, value in headers]


@lru_cache(maxsize=4096)
def _fixed(limits: EffectiveLimits) -> _Fixed:
    buckets: list[tuple[int, str, str, str]] = []
    policies: list[str] = []
    lines = ""
    for bucket in (limits.key_requests, *limits.buckets[1:]):
        name, unit = bucket.kind.name, bucket.kind.unit
        size = max(1, int(min(MOST, bucket.size)))
        own = f"x-ratelimit-remaining-{name}: ", f"\r\nx-ratelimit-reset-{name}: "
        buckets.append((size, *own, f'{", " if buckets else "RateLimit: "}"{name}";r='))
        policies.append(f'"{name}";q={size};' + (f'qu="{unit}";' if unit else "") + f"w={_window_s(bucket)}")
        lines += f"x-ratelimit-limit-{name}: {size}\r\n"
    if limits.max_concurrency:
        policies.append(f'"{CONCURRENCY}";q={limits.max_concurrency};qu="concurrent-requests"')
    quotas: list[tuple[str, int]] = []
    for name, amount in limits.quotas:
        counted = unit_of(name)
        q = f"q={amount // counted.header_parts};" + (f'qu="{counted.header}";' if counted.header else "")
        policies.append(f'"{quota_name(name)}";{q}w={quota_window_s(name)}')
        quotas.append((quota_name(name), counted.header_parts))
    lines += f"RateLimit-Policy: {', '.join(policies)}\r\n"
    return _Fixed(tuple(buckets), tuple(quotas), lines)


def _window_s(bucket: Bucket) -> int:
    """Seconds in which the whole bucket is refilled, at least 1."""
    if bucket.kind.size is None:
        return bucket.kind.period_s
    return max(1, math.ceil(min(MOST, bucket.size / bucket.per_s))) if bucket.rate > 0 else 1


def quota_window_s(name: str) -> int:
    """The maximum length of the window of a quota, in seconds, so that no client that paces by it is rejected early."""
    every, unit = period_parts(period_of(name))
    return every * PERIOD_S.get(unit, 1)


def _within(value: float, limit: int) -> int:
    whole = int(value)
    return limit if whole > limit else whole if whole > 0 else 0  # noqa: FURB136  # five times faster than min and max


def _seconds(milliseconds: int) -> int:
    return -(-milliseconds // 1000) if milliseconds > 0 else 0


@lru_cache(maxsize=4096)
def go_duration(milliseconds: int) -> str:
    """A duration in Go's format, as OpenAI sends it: `12ms`, `1s`, `1.5s`, `6m0s`, `1h0m0s`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if minutes < 60:
        return f"{minutes}m{seconds}" if minutes else seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}"
