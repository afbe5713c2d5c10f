"""Rejections by Redis that still hold: who is over a limit of its own is rejected here, without a call, until it may pass.

What is remembered belongs to one customer, one limit with its present values, and one cost: a limit that is changed, and a
request that costs less, are asked anew. It is forgotten after half a second at most, and when a request of the customer
ends here, since that may give back what the limit counts. Times are monotonic seconds.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from scheduler.protocol.admission import Submission, Verdict
from scheduler.states import Admission

MOST_S = 0.5
JITTER = 0.1
MOST_CUSTOMERS = 10_000

Values = tuple[object, ...]


class _Rejection(NamedTuple):
    verdict: Verdict
    values: Values  # Of the limit, as they were judged.
    cost: int
    at: float
    until: float


def _limit_of(outcome: Admission, asked: Submission) -> tuple[Values, int] | None:
    """The limit by which a request was rejected, and what it asked of it; None where waiting tells nothing."""
    match outcome:
        case Admission.KEY_LIMIT:
            return (asked.api_key_id, asked.key_rate, asked.key_burst), 1
        case Admission.CUSTOMER_LIMIT:
            return (asked.rate, asked.burst), 1
        case Admission.TOKEN_LIMIT:
            return (asked.tokens_per_minute,), asked.tokens
        case Admission.QUOTA:
            return tuple(asked.quotas), 1
    return None


class Rejections:
    """What is remembered in one pool. `draw` gives a number from 0 to 1."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self.held: dict[str, dict[Admission, _Rejection]] = {}  # By customer.

    def note(self, asked: Submission, verdict: Verdict, now: float) -> None:
        """Redis has rejected this one, which asked for itself alone."""
        limit = _limit_of(verdict.outcome, asked)
        if limit is None or verdict.retry_after_ms <= 0:
            return
        # A little longer for some, so that those who wait do not all ask in the same moment.
        wait_s = min(MOST_S, verdict.retry_after_ms / 1000 * (1 + JITTER * self._draw()))
        known = self.held.setdefault(asked.customer_id, {})
        known[verdict.outcome] = _Rejection(verdict, *limit, now, now + wait_s)
        if len(self.held) > MOST_CUSTOMERS:
            del self.held[next(iter(self.held))]

    def verdict(self, asked: Submission, now: float) -> Verdict | None:
        """How Redis would reject it, as far as is known; None where it has to be asked.

        One with an `Idempotency-Key` may have an answer already, and one that was accepted before is not judged.
        """
        known = self.held.get(asked.customer_id)
        if known is None or asked.idempotency or asked.again:
            return None
        for outcome, rejection in tuple(known.items()):
            if now >= rejection.until:
                del known[outcome]
                continue
            limit = _limit_of(outcome, asked)
            if limit is not None and limit[0] == rejection.values and limit[1] >= rejection.cost:
                return _later(rejection.verdict, asked, now - rejection.at)
        if not known:
            del self.held[asked.customer_id]
        return None

    def forget(self, customer_id: str) -> None:
        """One of its requests has ended."""
        self.held.pop(customer_id, None)


def _later(verdict: Verdict, asked: Submission, after_s: float) -> Verdict:
    """The same after so many seconds, in which buckets were refilled and nobody spent anything."""
    ms = round(after_s * 1000)
    of_key = verdict.outcome is Admission.KEY_LIMIT
    rate, burst = (asked.key_rate, asked.key_burst) if of_key else (asked.rate, asked.burst)
    tokens = verdict.tokens_left + after_s * asked.tokens_per_minute / 60
    return Verdict(
        outcome=verdict.outcome,
        remaining=min(verdict.remaining + after_s * rate, max(burst, verdict.remaining)),
        reset_ms=max(0, verdict.reset_ms - ms),
        retry_after_ms=max(1, verdict.retry_after_ms - ms),
        depth=verdict.depth,
        tokens_left=min(tokens, max(asked.tokens_per_minute, verdict.tokens_left)),
        tokens_reset_ms=max(0, verdict.tokens_reset_ms - ms),
        in_use=verdict.in_use,
        quotas=[(left, max(0, reset_ms - ms)) for left, reset_ms in verdict.quotas],
    )
