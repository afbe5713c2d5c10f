"""Rejections by a limit of the customer that still hold, so that Redis is not called for the same result.

The same customer, limit, values and cost are rejected here for as long as Redis reported, at most half a second. A
rejection is dropped when a request of the customer ends here, since that may free what the limit counts. Times are
monotonic seconds.
"""

from typing import NamedTuple

from ledger.catalog.snapshot import Identity
from ratelimit.limits import EffectiveLimits, Level, RemainingLimits
from scheduler.bounded_dict import BoundedDict
from scheduler.protocol.admission import Submission, SubmissionGroup, Verdict
from scheduler.states import Admission

MAX_KEPT_S = 0.5
MAX_CUSTOMERS = 10_000

LimitValues = tuple[object, ...]


class _Rejection(NamedTuple):
    verdict: Verdict
    values: LimitValues  # Of the limit, at the rejection.
    cost: int
    at: float
    until: float


def _limit_of(outcome: Admission, submission: Submission) -> tuple[LimitValues, int] | None:
    """The limit that rejected a request, and its cost; None where a wait allows no prediction."""
    if bucket := submission.limits.bucket_of(outcome):
        return (submission.api_key_id if outcome is Admission.KEY_LIMIT else "", bucket), bucket.kind.units(submission)
    if outcome is Admission.QUOTA:
        metered = submission.limits.metered
        return (*submission.limits.quotas, submission.meter), submission.tokens if metered else 1
    return None


class RejectionCache:
    """Rejections of one pool that still hold. None holds for longer than Redis reported: a client that obeys its Retry-After
    must not be rejected again.
    """

    def __init__(self) -> None:
        self.held: BoundedDict[str, dict[Admission, _Rejection]] = BoundedDict(MAX_CUSTOMERS)  # By customer.

    def note(self, submission: Submission, verdict: Verdict, now: float) -> None:
        """Keep a rejection by Redis of a request that was submitted by itself."""
        limit = _limit_of(verdict.outcome, submission)
        if limit is None or verdict.retry_after_ms <= 0:
            return
        wait_s = min(MAX_KEPT_S, verdict.retry_after_ms / 1000)
        known = self.held.setdefault(submission.customer_id, {})
        known[verdict.outcome] = _Rejection(verdict, *limit, now, now + wait_s)

    def verdict(self, submission: Submission, now: float) -> Verdict | None:
        """The rejection that Redis would return, as far as is known; None where Redis must decide.

        A request with an `Idempotency-Key` may have a response already, and one that was accepted before is not checked.
        """
        known = self.held.get(submission.customer_id)
        if known is None or submission.idempotency or submission.again:
            return None
        for outcome, rejection in tuple(known.items()):
            if now >= rejection.until:
                del known[outcome]
                continue
            limit = _limit_of(outcome, submission)
            if limit is not None and limit[0] == rejection.values and limit[1] >= rejection.cost:
                return _later(rejection.verdict, submission, now - rejection.at)
        if not known:
            del self.held[submission.customer_id]
        return None

    def verdict_of(self, identity: Identity, limits: EffectiveLimits, now: float) -> Verdict | None:
        """The rejection that any request of an identity gets now, as far as is known, before its submission is built."""
        if identity.customer_id not in self.held:
            return None
        group = SubmissionGroup(identity.tier, identity.customer_id, identity.key_id, "", limits)
        return self.verdict(Submission("", group, "", 0, 0, 0, b""), now)

    def forget(self, customer_id: str) -> None:
        """Drop what is kept of a customer: one of its requests has ended."""
        self.held.pop(customer_id, None)


def _later(verdict: Verdict, submission: Submission, after_s: float) -> Verdict:
    """The same after so many seconds, in which buckets were refilled and nothing was charged."""
    ms, left, buckets = round(after_s * 1000), verdict.left, list(submission.limits.buckets)
    if verdict.outcome is Admission.KEY_LIMIT and submission.limits.key:
        buckets[0] = submission.limits.key
    levels = [
        Level(min(level + after_s * bucket.per_s, max(bucket.size, level)), max(0, reset_ms - ms))
        for bucket, (level, reset_ms) in zip(buckets, left.buckets, strict=False)
    ]
    quotas = [(spare, max(0, reset_ms - ms)) for spare, reset_ms in left.quotas]
    retry_ms = max(1, verdict.retry_after_ms - ms)
    left = RemainingLimits(levels, left.in_use, quotas)
    return Verdict(verdict.outcome, left, retry_ms, verdict.depth, quotas=verdict.quotas)
