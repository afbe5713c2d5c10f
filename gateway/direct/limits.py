"""Limits while Redis is unavailable: this gateway's own share of each limit of a customer, a key and a tier. No I/O.

A token bucket of `burst` and `rate` becomes a sliding window that never lets through more than the bucket would. How
much was spent in Redis a moment ago is not known:

* of requests and tokens a quarter is available when a limit is first checked, the rest within its window; the first
  request of each customer is accepted,
* of a quota nothing counts as spent: rejecting a customer for a day whose quota may be unused would be worse than
  serving the quota once more, and the rates still hold. What was spent of a quota here is kept from one outage to the
  next.

Tokens stay charged as estimated. All but quotas begins anew with each outage; the number of limits is bounded.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from gateway.direct.queue import DirectQueue
from ratelimit.decision import ACCEPTED, AdmissionDecision, BucketLevel, CustomerLevels, QuotaLevel, decide
from ratelimit.headers import quota_window_s
from ratelimit.limits import REQUEST_BUCKET, Bucket, Level, RemainingLimits
from ratelimit.quotas import Meter, unit_of
from ratelimit.sliding_window import LocalLimit, SlidingWindows, WindowLevel
from scheduler.protocol.admission import Submission, TierLimit, Verdict
from scheduler.states import Admission

FIRST_FILL = 0.25
MAX_LIMITS = 40_000
"""Rates of some ten thousand customers, and as many quotas: 20 MB each, where so many come."""

REQUEST = 1000
"""Units that a request costs, so that the part of one that is free already is not lost in whole numbers."""

_LONGEST_S = 366 * 86_400.0

RETRY_MS = 500
"""The wait if the time until free depends on other requests."""

MOST_RETRY_MS = 60_000
"""The longest wait returned: Redis may be available again at any moment, and has the exact state."""


class Charge(NamedTuple):
    """What a request costs under one limit, and the rejection where there is not so much left."""

    rejection: Admission
    name: str
    limit: LocalLimit
    cost: int
    first: int | None = None  # Units that are there when it is first checked; None: nothing counts as spent.


class Charges(NamedTuple):
    """All that one request costs."""

    key: Charge | None
    buckets: tuple[Charge, ...]  # As in EffectiveLimits.
    quotas: tuple[Charge, ...]
    tier: Charge

    @property
    def requests(self) -> tuple[Charge, ...]:
        """The key's bucket, if it has one, and those of the customer."""
        return self.buckets if self.key is None else (self.key, *self.buckets)

    @property
    def every(self) -> tuple[Charge, ...]:
        """In the order of admission."""
        return (*self.requests, *self.quotas, self.tier)


class LocalLimits:
    """What was spent here, under every limit. Times are monotonic seconds."""

    def __init__(self, max_limits: int = MAX_LIMITS) -> None:
        self._rates = SlidingWindows(max_limits)
        self._quotas = SlidingWindows(max_limits)

    def __len__(self) -> int:
        return len(self._rates) + len(self._quotas)

    def clear(self) -> None:
        """Begin anew, with all but quotas."""
        self._rates.clear()

    def meet(self, charges: Sequence[Charge], now: float) -> None:
        """Set the limits that are checked at this time. Nothing is spent."""
        self._rates.now_us = self._quotas.now_us = int(now * 1e6)
        for charge in charges:
            if charge.first is not None:  # Of a quota that changes, what was spent is kept, and not what is left.
                self._rates.meet(charge.name, charge.limit, max(charge.first, charge.cost))

    def left(self, charge: Charge) -> int:
        """The whole units that are left of its limit."""
        return charge.limit.amount - math.floor(self.level(charge).used)

    def spend(self, charges: Sequence[Charge]) -> None:
        """Pay all of them, while each has enough left: it is all or nothing."""
        for charge in charges:
            self._windows_of(charge).spend(charge.name, charge.limit, charge.cost)

    def level(self, charge: Charge) -> WindowLevel:
        """How far its limit is used."""
        return self._windows_of(charge).level(charge.name, charge.limit)

    def _windows_of(self, charge: Charge) -> SlidingWindows:
        return self._quotas if charge.first is None else self._rates


@lru_cache(maxsize=4096)
def bucket(rate: float, burst: float, unit: int) -> tuple[LocalLimit, int]:
    """The sliding window that replaces a token bucket whose requests cost `unit` units, and its initial units.

    What is spent in one window becomes free evenly over the next one. A window of one request less than the bucket's
    size, as long as the rate needs for that many, admits the full rate, and never more than the bucket would. A bucket
    smaller than two is treated as one of two: both may be used around the end of a window, and then the rate holds again.
    """
    whole = max(2, int(burst))
    length_s = min(_LONGEST_S, (whole - 1) / rate) if rate > 0 else _LONGEST_S
    limit = LocalLimit(whole * unit - 1, max(1, math.ceil(length_s * 1e6)), (whole - 1) * unit)
    return limit, int(max(1.0, burst * FIRST_FILL) * unit)


@lru_cache(maxsize=1024)
def quota(period: str, amount: float) -> LocalLimit:
    """The window for a quota of a name such as "1day"; a part of a unit is one."""
    return LocalLimit(max(1, int(amount)), quota_window_s(period) * 1_000_000)


def cells_sharing(submission: Submission) -> int:
    """The divisor of the limits of a customer of several cells: without Redis a cell has half of its even part."""
    return 2 * submission.limits.spread if submission.limits.spread > 1 else 1


def charges_of(submission: Submission, tier: TierLimit, gateways: int) -> Charges:
    """What it costs at one of so many gateways, which has its part of each limit."""
    limits, parts = submission.limits, gateways * cells_sharing(submission)
    key = _charge(Admission.KEY_LIMIT, submission.api_key_id, limits.key, 1, parts) if limits.key else None
    buckets = tuple(
        _charge(Admission(b.kind.outcome), submission.customer_id, b, b.kind.units(submission), parts)
        for b in limits.buckets
    )
    quotas: list[Charge] = []
    for name, amount in limits.quotas:
        mark, meter = unit_of(name).mark, submission.meter or Meter()
        cost = meter.units(mark, submission.tokens) if mark else 1
        of_quota = f"quota {name} {submission.customer_id}"
        quotas.append(Charge(Admission.QUOTA, of_quota, quota(name, amount / parts), cost))
    whole = _charge(Admission.TIER_LIMIT, tier.name, Bucket(REQUEST_BUCKET, tier.rate, tier.burst), 1, gateways)
    return Charges(key, buckets, tuple(quotas), whole)


def of_all(charges: Charges, together: Sequence[Submission]) -> Charges:
    """The same for requests which enter together or not at all."""
    count = len(together)
    key = charges.key and charges.key._replace(cost=charges.key.cost * count)
    buckets = tuple(
        charge._replace(
            cost=min(sum(map(bucket.kind.units, together)), charge.limit.amount)
            if bucket.kind.cost
            else charge.cost * count
        )
        for charge, bucket in zip(charges.buckets, together[0].limits.buckets, strict=True)
    )
    quotas = tuple(charge._replace(cost=charge.cost * count) for charge in charges.quotas)
    return Charges(key, buckets, quotas, charges.tier._replace(cost=charges.tier.cost * count))


def _charge(rejection: Admission, name: str, of: Bucket, units: int, gateways: int) -> Charge:
    unit = 1 if of.kind.cost else REQUEST
    limit, first = bucket(of.per_s / gateways, of.size / gateways, unit)
    # A request that is larger than the whole limit enters when all of it is there.
    cost = min(units, limit.amount) if of.kind.cost else units * unit
    return Charge(rejection, f"{rejection.value} {name}", limit, cost, first)


class DirectAdmission:
    """Judges as `admit` does, all or nothing: the client's own limits, the tier's, then room."""

    def __init__(self, queue: DirectQueue, limits: LocalLimits | None = None) -> None:
        self._queue = queue
        self._limits = LocalLimits() if limits is None else limits
        self._gateways = 1

    def open(self, gateways: int) -> None:
        """Direct mode begins, with so many gateways to share the limits with."""
        self._limits.clear()
        self._gateways = max(1, gateways)

    def close(self) -> None:
        """It is over: keep nothing that is not needed."""
        self._limits.clear()

    def judge(self, submission: Submission, tier: TierLimit, priority: int, now: float, *, in_use: int) -> Verdict:
        """The verdict on a newcomer, whose customer has `in_use` requests here; `now` is monotonic seconds."""
        charges = charges_of(submission, tier, self._gateways)
        is_full = not self._queue.has_room(priority)
        decision = self._decided(submission, charges, tier, now, in_use=in_use, is_full=is_full)
        if decision.outcome == ACCEPTED:
            in_use += 1
            if not decision.limit:
                self._limits.spend(charges.every)
        return self._verdict(submission, charges, decision, in_use, self._queue.ahead_of(priority))

    def keeps_out(
        self, together: Sequence[Submission], tier: TierLimit, priority: int, now: float, *, in_use: int
    ) -> Verdict | None:
        """The verdict on a list for all of which there is not enough; None where each may come. Nothing is spent."""
        first = together[0]
        charges = charges_of(first, tier, self._gateways)
        # A limit that is checked for the first time is checked for one request.
        decision = self._decided(first, charges, tier, now, in_use=in_use)
        if not decision.limit:
            charges = of_all(charges, together)
            decision = self._decided(first, charges, tier, now, in_use=in_use, count=len(together))
        if decision.outcome == ACCEPTED:
            return None
        return self._verdict(first, charges, decision, in_use, self._queue.ahead_of(priority))

    def _decided(
        self,
        submission: Submission,
        charges: Charges,
        tier: TierLimit,
        now: float,
        *,
        in_use: int,
        count: int = 1,
        is_full: bool = False,
    ) -> AdmissionDecision:
        self._limits.meet(charges.every, now)
        left, concurrency = self._limits.left, submission.limits.max_concurrency
        customer = CustomerLevels(
            [BucketLevel(charge.rejection, left(charge), charge.cost) for charge in charges.requests],
            in_use,
            concurrency and max(1, concurrency // (self._gateways * cells_sharing(submission))),
            [QuotaLevel(left(charge), charge.cost) for charge in charges.quotas],
        )
        tier_bucket = BucketLevel(charges.tier.rejection, left(charges.tier), charges.tier.cost)
        return decide(customer, tier, tier_bucket, None, is_full=is_full, count=count)

    def _verdict(
        self, submission: Submission, charges: Charges, decision: AdmissionDecision, in_use: int, depth: int
    ) -> Verdict:
        """The verdict has the whole of the client's limits, which it spreads over all gateways."""
        limits, outcome = submission.limits, Admission(decision.outcome)
        retry_ms = 0
        named: tuple[str, ...] = ()
        if outcome in {Admission.CONCURRENCY, Admission.QUEUE_FULL}:
            retry_ms = RETRY_MS
        elif outcome is not Admission.ACCEPTED:
            rejected = charges.tier
            if outcome is Admission.QUOTA:
                rejected, named = charges.quotas[decision.at], (limits.quotas[decision.at][0],)
            elif outcome is not Admission.TIER_LIMIT:
                rejected = charges.requests[decision.at]
            wait_us = self._limits.level(rejected).until_us(max(0, rejected.limit.amount - rejected.cost))
            retry_ms = min(MOST_RETRY_MS, _ms(wait_us))
        levels = [self._level(charge, of) for charge, of in zip(charges.buckets, limits.buckets, strict=True)]
        if charges.key is not None and limits.key is not None:
            levels[0] = min(levels[0], self._level(charges.key, limits.key))
        if limits.max_concurrency:
            in_use = min(limits.max_concurrency, in_use * self._gateways)
        quotas: list[tuple[int, int]] = []
        for charge, (_, amount) in zip(charges.quotas, limits.quotas, strict=True):
            level = self._limits.level(charge)
            spare = max(0, int(charge.limit.amount - level.used))
            quotas.append((min(amount, spare * self._gateways), _ms(level.left_us)))
        left = RemainingLimits(levels, in_use, quotas)
        return Verdict(outcome, left, retry_ms, depth, shadowed=decision.shadowed, quotas=named)

    def _level(self, charge: Charge, of: Bucket) -> Level:
        level, unit = self._limits.level(charge), 1 if of.kind.cost else REQUEST
        left = max(0.0, (charge.limit.amount - level.used) / unit)
        return Level(min(of.size, left * self._gateways), _ms(level.until_us(0)))


def _ms(microseconds: float) -> int:
    return int(microseconds / 1000) + 1 if microseconds else 0
