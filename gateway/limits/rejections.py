"""The error of a rejection by admission, with its message and Retry-After."""

from gateway.http.errors import RejectionError
from ratelimit.capacity import MOST_MS, retry_after_ms
from ratelimit.limits import CONCURRENCY, OWN_OUTCOMES, REDUCED_OUTCOMES, REQUESTS, EffectiveLimits
from ratelimit.quotas import is_metered, key_of, quota_name, quota_words
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Verdict
from scheduler.states import Admission

OWN_LIMITS = frozenset(map(Admission, OWN_OUTCOMES))
"""Rejections by what the customer may do, whatever other customers do."""

LOWERED = frozenset(map(Admission, REDUCED_OUTCOMES))
"""Rejections by a limit that is reduced with the capacity."""

_CODES = dict.fromkeys(OWN_LIMITS, ErrorCode.RATE_LIMIT_EXCEEDED) | {
    Admission.QUOTA: ErrorCode.QUOTA_EXCEEDED,
    Admission.TIER_LIMIT: ErrorCode.REDUCED_CAPACITY,
    Admission.SHED: ErrorCode.SHED_FOR_PRIORITY,
    Admission.QUEUE_FULL: ErrorCode.QUEUE_FULL,
    Admission.WAIT: ErrorCode.QUEUE_FULL,
    Admission.BACKPRESSURE: ErrorCode.BACKPRESSURE,
    Admission.IN_PROGRESS: ErrorCode.IDEMPOTENCY_IN_PROGRESS,
    Admission.ELSEWHERE: ErrorCode.NO_CAPACITY,
    Admission.TOO_LATE: ErrorCode.DEADLINE_EXCEEDED,
    Admission.REUSED: ErrorCode.IDEMPOTENCY_KEY_REUSED,
}

# A short queue gives a hint of a few milliseconds, whose jitter would not spread the retries.
_LEAST_RETRY_MS = {
    Admission.SHED: 100,
    Admission.QUEUE_FULL: 100,
    Admission.WAIT: 100,
    Admission.TIER_LIMIT: 250,
    Admission.CONCURRENCY: 250,
    Admission.IN_PROGRESS: 500,
}
NO_ROOM = frozenset({Admission.SHED, Admission.QUEUE_FULL, Admission.WAIT, Admission.TIER_LIMIT})
_MOST_PRESSURE = 120.0  # Half a minute.
_MOST_WHERE_LOWERED_MS = 60_000  # At a rate close to 0, the wait is a guess about the capacity.

_OWN_DOING = frozenset(
    {
        ErrorCode.RATE_LIMIT_EXCEEDED,
        ErrorCode.QUOTA_EXCEEDED,
        ErrorCode.IDEMPOTENCY_IN_PROGRESS,
        ErrorCode.IDEMPOTENCY_KEY_REUSED,
    }
)


def rejection_error(
    verdict: Verdict,
    *,
    base_limit_allows: bool,
    limits: EffectiveLimits | None = None,
    factor: float = 1.0,
    drain_rps: float = 0.0,
    pressure: float = 1.0,
) -> RejectionError:
    """The error for a verdict that rejects under `limits`, which are `factor` of the base.

    `drain_rps` is the responses/s of the tier, `pressure` its demand as a multiple of its part of the capacity. A request
    that is rejected only because limits are reduced gets `reduced_capacity`.
    """
    lowered = base_limit_allows and verdict.outcome in LOWERED
    code = ErrorCode.REDUCED_CAPACITY if lowered else _CODES[verdict.outcome]
    retry_ms = _retry_ms(verdict, drain_rps, pressure)
    if factor < 1 and verdict.outcome in LOWERED:
        retry_ms = min(retry_ms, _MOST_WHERE_LOWERED_MS)
    if verdict.outcome is Admission.WAIT:
        return RejectionError(code, "The predicted wait is longer than this request may take.", retry_ms)
    if limits is None or verdict.outcome not in OWN_LIMITS:
        return RejectionError(code, retry_after_ms=retry_ms)
    message = _words(verdict, limits) + (" It is reduced while less capacity is available." if lowered else "")
    bucket = limits.bucket_of(verdict.outcome)
    policies = [bucket.kind.name if bucket else CONCURRENCY if verdict.outcome is Admission.CONCURRENCY else REQUESTS]
    if verdict.outcome is Admission.QUOTA:
        policies = [quota_name(period) for period, _ in spent_quotas(verdict, limits)]
    return RejectionError(code, message, retry_ms, tuple(policies))


def is_capacity_rejection(code: ErrorCode) -> bool:
    """Whether a rejection counts as shed: the client kept its limits and was rejected all the same."""
    return code not in _OWN_DOING


def _retry_ms(verdict: Verdict, drain_rps: float, pressure: float) -> int:
    wait_ms, least_ms = verdict.retry_after_ms, _LEAST_RETRY_MS.get(verdict.outcome, 0)
    if verdict.outcome in NO_ROOM:
        measured_ms = retry_after_ms(verdict.depth, drain_rps, wait_ms)
        if verdict.outcome is not Admission.TIER_LIMIT:
            return max(measured_ms, least_ms)
        # Clients at an empty bucket do not wait in a queue, so its depth gives no hint: each must retry less often, by the pressure.
        wait_ms = max(measured_ms, min(wait_ms, MOST_MS), int(least_ms * min(max(1.0, pressure), _MOST_PRESSURE)))
    return max(wait_ms, least_ms)


def _words(verdict: Verdict, limits: EffectiveLimits) -> str:
    """The limit that rejected, with its number as it is now."""
    if bucket := limits.bucket_of(verdict.outcome):
        owner = "API key" if bucket is limits.key else "account"
        return f"The rate limit of this {owner}, {bucket.words}, is reached."
    if verdict.outcome is Admission.CONCURRENCY:
        return f"The concurrency limit of this account, {limits.max_concurrency} requests at a time, is reached."
    if verdict.outcome is Admission.QUOTA:
        named = spent_quotas(verdict, limits) or limits.quotas
        left = {name: units for (name, _), (units, _) in zip(limits.quotas, verdict.left.quotas, strict=False)}
        has_some = any(is_metered(name) or left.get(name, 0) >= 1 for name, _ in named)
        state = "has too little left for this request" if has_some else "is used up"
        words = " and ".join(quota_words(*quota) for quota in named)
        owners = {"API key" if key_of(name) else "account" for name, _ in named}
        return f"The quota of this {' and '.join(sorted(owners))}, {words}, {state}; it resets in {_span(verdict.retry_after_ms)}."
    return "The rate limit of this API key is reached."  # Its limit was removed while the request waited.


def _span(ms: int) -> str:
    """A time in its two largest units, such as 20 h 43 min, rounded up to the smaller one."""
    seconds = -(-ms // 1000)
    if seconds < 60:
        return f"{seconds} s"
    minutes = -(-seconds // 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if hours else f"{minutes} min"
    days, hours = divmod(hours + (minutes > 0), 24)
    return f"{days} d {hours} h"


def spent_quotas(verdict: Verdict, limits: EffectiveLimits) -> list[tuple[str, int]]:
    """Name and amount of the quotas that reject: without room for the request or, if that is not known, with nothing left."""
    if verdict.quotas:
        return [quota for quota in limits.quotas if quota[0] in verdict.quotas]
    return [quota for quota, (left, _) in zip(limits.quotas, verdict.left.quotas, strict=False) if left < 1]
