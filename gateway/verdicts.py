"""What a refusal by admission is called outside: outcome -> error code, with the time after which to try again."""

from gateway.faults import Refusal
from scheduler.admission import Verdict
from scheduler.errors import ErrorCode
from scheduler.states import Admission

_CODES = {
    Admission.KEY_LIMIT: ErrorCode.RATE_LIMIT_EXCEEDED,
    Admission.TIER_LIMIT: ErrorCode.REDUCED_CAPACITY,
    Admission.SHED: ErrorCode.SHED_FOR_PRIORITY,
    Admission.QUEUE_FULL: ErrorCode.QUEUE_FULL,
    Admission.BACKPRESSURE: ErrorCode.BACKPRESSURE,
    Admission.IN_PROGRESS: ErrorCode.IDEMPOTENCY_IN_PROGRESS,
    Admission.TOO_LATE: ErrorCode.DEADLINE_EXCEEDED,
    Admission.REUSED: ErrorCode.IDEMPOTENCY_KEY_REUSED,
}


# A hint from a short line says a few milliseconds, whose jitter would spread nobody who comes back.
_LEAST_RETRY_MS = {Admission.SHED: 100, Admission.QUEUE_FULL: 100, Admission.IN_PROGRESS: 500}

_OWN_DOING = frozenset(
    {
        ErrorCode.RATE_LIMIT_EXCEEDED,
        ErrorCode.QUOTA_EXCEEDED,
        ErrorCode.IDEMPOTENCY_IN_PROGRESS,
        ErrorCode.IDEMPOTENCY_KEY_REUSED,
    }
)


def refusal(verdict: Verdict, *, base_limit_allows: bool) -> Refusal:
    """The error for a verdict that refuses.

    A key that is stopped only because its tier's limits are lowered is told so: the client did nothing wrong.
    """
    retry_ms = max(verdict.retry_after_ms, _LEAST_RETRY_MS.get(verdict.outcome, 0))
    if verdict.outcome is Admission.KEY_LIMIT and base_limit_allows:
        return Refusal(ErrorCode.REDUCED_CAPACITY, retry_after_ms=retry_ms)
    return Refusal(_CODES[verdict.outcome], retry_after_ms=retry_ms)


def for_want_of_capacity(code: ErrorCode) -> bool:
    """Whether a refusal counts as shed: the client kept its limits and was refused all the same."""
    return code not in _OWN_DOING
