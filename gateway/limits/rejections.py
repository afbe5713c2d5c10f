"""Rejections by admission: their error and Retry-After, the record for `explain`, and those that still hold.

A rejection by a limit of the customer is repeated for as long as Redis reported, at most half a second: the same
customer, limit, values and cost are rejected here without a call. It is dropped when a request of the customer ends here,
since that may free what the limit counts. Times are monotonic seconds.

The log is a bounded buffer of the rejections since the last heartbeat. The first few of each customer and reason are
kept whole and the rest counted; in a full buffer a new customer or reason replaces the newest entry of one that has
several.
"""

from typing import NamedTuple

import msgspec

from gateway.catalog import IdentityView
from gateway.http.errors import RejectionError
from ratelimit.capacity import MOST_MS, retry_after_ms
from ratelimit.limits import (
    CONCURRENCY,
    NO_BUCKET,
    OWN_OUTCOMES,
    REDUCED_OUTCOMES,
    REQUESTS,
    EffectiveLimits,
    Level,
    RemainingLimits,
    effective,
)
from ratelimit.quotas import is_metered, quota_name, quota_words
from scheduler.bounded_dict import BoundedDict
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Submission, Verdict
from scheduler.protocol.limits import MAX_PER_HEARTBEAT, RejectionRecord
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
    return RejectionError(code, message, retry_ms, _policies(verdict, limits))


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
        named = _spent(verdict, limits) or limits.quotas
        state = "has too little left for this request" if any(is_metered(name) for name, _ in named) else "is used up"
        return f"The quota of this account, {' and '.join(quota_words(*quota) for quota in named)}, {state}."
    return "The rate limit of this API key is reached."  # Its limit was removed while the request waited.


def _spent(verdict: Verdict, limits: EffectiveLimits) -> list[tuple[str, int]]:
    """Name and amount of the quotas that reject: without room for the request or, if that is not known, with nothing left."""
    if verdict.quotas:
        return [quota for quota in limits.quotas if quota[0] in verdict.quotas]
    return [quota for quota, (left, _) in zip(limits.quotas, verdict.left.quotas, strict=False) if left < 1]


def _policies(verdict: Verdict, limits: EffectiveLimits) -> tuple[str, ...]:
    """The names, as in RateLimit-Policy, of the limits that rejected."""
    if verdict.outcome is Admission.QUOTA:
        return tuple(quota_name(period) for period, _ in _spent(verdict, limits))
    bucket = limits.bucket_of(verdict.outcome)
    return (bucket.kind.name if bucket else CONCURRENCY if verdict.outcome is Admission.CONCURRENCY else REQUESTS,)


SAME_A_BEAT = 8
"""Rejections of one customer and reason that are kept from one heartbeat."""

_Group = tuple[str, str, str]  # Customer, code and outcome.


class RejectionLog:
    """The buffer. Each call is O(1): it happens while requests are rejected by the thousand."""

    def __init__(self, most: int = MAX_PER_HEARTBEAT, same: int = SAME_A_BEAT) -> None:
        self._most = most
        self._same = same
        self._kept: dict[_Group, list[RejectionRecord]] = {}
        self._more: dict[_Group, int] = {}
        self._several: dict[_Group, None] = {}  # Groups with an entry to spare; a dict, since sets have no order.
        self._size = 0
        self.left_out = 0  # Since the start: neither kept nor counted with a kept one.

    def note(
        self,
        submission: Submission,
        identity: IdentityView,
        error: RequestError,
        verdict: Verdict | None,
        factor: float,
    ) -> None:
        """Keep or count one rejection. `factor` is that of its tier now; without a verdict there was no call of admission."""
        group = (identity.customer_id, error.code.value, verdict.outcome.value if verdict else "")
        kept = self._kept.get(group)
        if kept is None:
            if self._size >= self._most and not self._drop_one():
                self.left_out += 1
                return
            self._kept[group] = [_refusal(submission, identity, error, verdict, factor)]
        elif len(kept) < self._same and self._size < self._most:
            kept.append(_refusal(submission, identity, error, verdict, factor))
            self._several[group] = None
        else:
            self._more[group] = self._more.get(group, 0) + 1
            return
        self._size += 1

    def drain(self) -> list[RejectionRecord]:
        """Everything kept since the last call, oldest first; the last of a group has the number of further ones."""
        for group, count in self._more.items():
            kept = self._kept[group]
            kept[-1] = msgspec.structs.replace(kept[-1], more=count)
        drained = [rejection for kept in self._kept.values() for rejection in kept]
        self._kept, self._more, self._several, self._size = {}, {}, {}, 0
        return sorted(drained, key=lambda rejection: rejection.id)

    def _drop_one(self) -> bool:
        """Drop an entry of a group that has several; False where each has but one."""
        if not self._several:
            return False
        group = next(iter(self._several))  # In turns: the group goes to the end.
        del self._several[group]
        kept = self._kept[group]
        kept.pop()
        self._more[group] = self._more.get(group, 0) + 1
        self._size -= 1
        if len(kept) > 1:
            self._several[group] = None
        return True


def _refusal(
    submission: Submission, identity: IdentityView, error: RequestError, verdict: Verdict | None, factor: float
) -> RejectionRecord:
    """The limits that were in force, and the state that admission reported."""
    now = effective(identity, factor)
    requests, tokens = now.buckets[0], now.bucket_of(Admission.TOKEN_LIMIT)
    own = now.key or NO_BUCKET
    record = RejectionRecord(
        id=submission.id,
        customer_id=identity.customer_id,
        key_id=identity.key_id,
        tier=identity.tier,
        code=error.code.value,
        factor=round(factor, 4),
        rate=round(requests.rate, 4),
        burst=round(requests.size, 4),
        tokens_per_minute=round(tokens.rate, 4) if tokens else 0.0,
        max_concurrency=now.max_concurrency,
        key_rate=round(own.rate, 4),
        key_burst=round(own.size, 4),
        retry_after_ms=(error.retry_after_ms or 0) if isinstance(error, RejectionError) else 0,
        endpoint=submission.endpoint,
    )
    return record if verdict is None else _with(record, now, verdict)


def _with(record: RejectionRecord, limits: EffectiveLimits, verdict: Verdict) -> RejectionRecord:
    period, amount = _used_up(limits, verdict)
    levels = {b.kind.outcome: level.left for b, level in zip(limits.buckets, verdict.left.buckets, strict=False)}
    rejecting = limits.bucket_of(verdict.outcome)
    requests = levels.get(Admission.CUSTOMER_LIMIT, 0.0)
    return msgspec.structs.replace(
        record,
        outcome=verdict.outcome.value,
        quota=period,
        quota_amount=amount,
        remaining=round(requests, 3),
        tokens_left=round(levels.get(Admission.TOKEN_LIMIT, 0.0), 3),
        in_use=verdict.left.in_use,
        depth=verdict.depth,
        retry_after_ms=record.retry_after_ms or verdict.retry_after_ms,
        limit=rejecting.words if rejecting else "",
        left=round(levels.get(verdict.outcome, requests), 3) if rejecting else 0.0,
    )


def _used_up(limits: EffectiveLimits, verdict: Verdict) -> tuple[str, int]:
    """Name and amount of the quota that rejected: the first without room, in the order of admission."""
    return next(iter(_spent(verdict, limits)), ("", 0)) if verdict.outcome is Admission.QUOTA else ("", 0)


MOST_S = 0.5
MOST_CUSTOMERS = 10_000

Values = tuple[object, ...]


class _Rejection(NamedTuple):
    verdict: Verdict
    values: Values  # Of the limit, at the rejection.
    cost: int
    at: float
    until: float


def _limit_of(outcome: Admission, submission: Submission) -> tuple[Values, int] | None:
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
        self.held: BoundedDict[str, dict[Admission, _Rejection]] = BoundedDict(MOST_CUSTOMERS)  # By customer.

    def note(self, submission: Submission, verdict: Verdict, now: float) -> None:
        """Keep a rejection by Redis of a request that was submitted by itself."""
        limit = _limit_of(verdict.outcome, submission)
        if limit is None or verdict.retry_after_ms <= 0:
            return
        wait_s = min(MOST_S, verdict.retry_after_ms / 1000)
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

    def verdict_of(self, identity: IdentityView, limits: EffectiveLimits, now: float) -> Verdict | None:
        """The rejection that any request of an identity gets now, as far as is known, before its submission is built."""
        if identity.customer_id not in self.held:
            return None
        any_request = Submission(
            id="",
            tier=identity.tier,
            customer_id=identity.customer_id,
            api_key_id=identity.key_id,
            nonce="",
            model="",
            input_bytes=0,
            total_ms=0,
            queue_ms=0,
            limits=limits,
            body=b"",
        )
        return self.verdict(any_request, now)

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
