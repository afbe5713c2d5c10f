"""What a refusal by admission is called outside: outcome -> error code and sentence, and when trying again pays."""

from gateway.http.errors import Refusal
from ratelimit.effective import Effective
from ratelimit.headers import CONCURRENCY, REQUESTS, TOKENS, quota_name
from ratelimit.retry_after import MOST_MS, retry_after_ms
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Verdict
from scheduler.states import Admission

_CODES = {
    Admission.KEY_LIMIT: ErrorCode.RATE_LIMIT_EXCEEDED,
    Admission.CUSTOMER_LIMIT: ErrorCode.RATE_LIMIT_EXCEEDED,
    Admission.TOKEN_LIMIT: ErrorCode.RATE_LIMIT_EXCEEDED,
    Admission.CONCURRENCY: ErrorCode.RATE_LIMIT_EXCEEDED,
    Admission.QUOTA: ErrorCode.QUOTA_EXCEEDED,
    Admission.TIER_LIMIT: ErrorCode.REDUCED_CAPACITY,
    Admission.SHED: ErrorCode.SHED_FOR_PRIORITY,
    Admission.QUEUE_FULL: ErrorCode.QUEUE_FULL,
    Admission.WAIT: ErrorCode.QUEUE_FULL,
    Admission.BACKPRESSURE: ErrorCode.BACKPRESSURE,
    Admission.IN_PROGRESS: ErrorCode.IDEMPOTENCY_IN_PROGRESS,
    Admission.TOO_LATE: ErrorCode.DEADLINE_EXCEEDED,
    Admission.REUSED: ErrorCode.IDEMPOTENCY_KEY_REUSED,
}

LOWERED = frozenset({Admission.KEY_LIMIT, Admission.CUSTOMER_LIMIT, Admission.TOKEN_LIMIT})
"""Refusals by a limit that falls with the capacity."""

OWN_LIMITS = LOWERED | {Admission.CONCURRENCY, Admission.QUOTA}
"""Refusals by what the customer may do, whatever the others do."""

# A hint from a short line says a few milliseconds, whose jitter would spread nobody who comes back.
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
_MOST_WHERE_LOWERED_MS = 60_000  # At a rate that is nearly nothing now, the wait is a guess about the capacity.

_OWN_DOING = frozenset(
    {
        ErrorCode.RATE_LIMIT_EXCEEDED,
        ErrorCode.QUOTA_EXCEEDED,
        ErrorCode.IDEMPOTENCY_IN_PROGRESS,
        ErrorCode.IDEMPOTENCY_KEY_REUSED,
    }
)


def refusal(
    verdict: Verdict,
    *,
    base_limit_allows: bool,
    limits: Effective | None = None,
    factor: float = 1.0,
    drain_rps: float = 0.0,
    pressure: float = 1.0,
) -> Refusal:
    """The error for a verdict that refuses under `limits`, which are `factor` of the base; the tier drains at `drain_rps`.

    `pressure` is how many times its part of the capacity the tier asks for.
    Who is stopped only because the tier's limits are lowered is told so: the client did nothing wrong.
    """
    lowered = base_limit_allows and verdict.outcome in LOWERED
    code = ErrorCode.REDUCED_CAPACITY if lowered else _CODES[verdict.outcome]
    retry_ms = _retry_ms(verdict, drain_rps, pressure)
    if factor < 1 and verdict.outcome in LOWERED:
        retry_ms = min(retry_ms, _MOST_WHERE_LOWERED_MS)
    if verdict.outcome is Admission.WAIT:
        return Refusal(code, "The predicted wait is longer than this request may take.", retry_ms)
    if limits is None or verdict.outcome not in OWN_LIMITS:
        return Refusal(code, retry_after_ms=retry_ms)
    message = _words(verdict, limits) + (" It is lowered while less capacity is available." if lowered else "")
    return Refusal(code, message, retry_ms, _policies(verdict, limits))


def for_want_of_capacity(code: ErrorCode) -> bool:
    """Whether a refusal counts as shed: the client kept its limits and was refused all the same."""
    return code not in _OWN_DOING


def _retry_ms(verdict: Verdict, drain_rps: float, pressure: float) -> int:
    wait_ms, least_ms = verdict.retry_after_ms, _LEAST_RETRY_MS.get(verdict.outcome, 0)
    if verdict.outcome in NO_ROOM:
        measured_ms = retry_after_ms(verdict.depth, drain_rps, wait_ms)
        if verdict.outcome is not Admission.TIER_LIMIT:
            return max(measured_ms, least_ms)
        # Nobody of a crowd at a full bucket stands in a line, so the line says nothing: each is to come so much rarer.
        wait_ms = max(measured_ms, min(wait_ms, MOST_MS), int(least_ms * min(max(1.0, pressure), _MOST_PRESSURE)))
    return max(wait_ms, least_ms)


def _words(verdict: Verdict, limits: Effective) -> str:
    """Which limit it was, with its number as it is now."""
    match verdict.outcome:
        case Admission.KEY_LIMIT if limits.key_rate > 0:
            return f"The rate limit of this API key, {_requests(limits.key_rate, limits.key_burst)}, is reached."
        case Admission.KEY_LIMIT | Admission.CUSTOMER_LIMIT:
            return f"The rate limit of this account, {_requests(limits.rate, limits.burst)}, is reached."
        case Admission.TOKEN_LIMIT:
            return f"The limit of this account, {int(limits.tokens_per_minute)} tokens per minute, is reached."
        case Admission.CONCURRENCY:
            return f"The concurrency limit of this account, {limits.max_concurrency} requests at a time, is reached."
        case _:
            return f"The quota of this account, {_quotas(verdict, limits)}, is used up."


def _requests(rate: float, burst: float) -> str:
    return f"{_number(rate)} requests/s (burst {int(burst)})"


def _number(value: float) -> str:
    digits = f"{value:.2f}" if value >= 1 else f"{value:.6f}"
    return digits.rstrip("0").rstrip(".")


def _quotas(verdict: Verdict, limits: Effective) -> str:
    named = _spent(verdict, limits) or limits.quotas
    return " and ".join(f"{amount} requests per {quota_name(period)}" for period, amount in named)


def _spent(verdict: Verdict, limits: Effective) -> list[tuple[str, int]]:
    return [quota for quota, (left, _) in zip(limits.quotas, verdict.quotas, strict=False) if left < 1]


def _policies(verdict: Verdict, limits: Effective) -> tuple[str, ...]:
    """The names, as in RateLimit-Policy, of what stood in the way."""
    if verdict.outcome is Admission.QUOTA:
        return tuple(quota_name(period) for period, _ in _spent(verdict, limits))
    return (_POLICIES[verdict.outcome],)


_POLICIES = {
    Admission.KEY_LIMIT: REQUESTS,
    Admission.CUSTOMER_LIMIT: REQUESTS,
    Admission.TOKEN_LIMIT: TOKENS,
    Admission.CONCURRENCY: CONCURRENCY,
}
