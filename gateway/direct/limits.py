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

from limits.strategies import SlidingWindowCounterRateLimiter

from gateway.direct.queue import DirectQueue
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

_AFTER_CONCURRENCY = (Admission.QUOTA, Admission.TIER_LIMIT)


class Charge(NamedTuple):
    """What a request costs under one limit, and the rejection where there is not so much left."""

    rejection: Admission
    name: str
    limit: LocalLimit
    cost: int
    first: int | None = None  # Units that are there when it is first checked; None: nothing counts as spent.


class Charges(NamedTuple):
    """All that one request costs; `every` in the order in which a rejection is reported."""

    key: Charge | None
    buckets: tuple[Charge, ...]  # As in EffectiveLimits.
    quotas: tuple[Charge, ...]
    every: tuple[Charge, ...]


class LocalLimits:
    """What was spent here, under every limit. Times are monotonic seconds."""

    def __init__(self, max_limits: int = MAX_LIMITS) -> None:
        self._rates = SlidingWindows(max_limits)
        self._quotas = SlidingWindows(max_limits)
        self._rate_strategy = SlidingWindowCounterRateLimiter(self._rates)
        self._quota_strategy = SlidingWindowCounterRateLimiter(self._quotas)

    def __len__(self) -> int:
        return len(self._rates) + len(self._quotas)

    def clear(self) -> None:
        """Begin anew, with all but quotas."""
        self._rates.reset()

    def rejected(self, charges: Sequence[Charge], now: float) -> Charge | None:
        """The first that has too little left. Nothing is spent."""
        self._rates.now_us = self._quotas.now_us = int(now * 1e6)
        for charge in charges:
            if charge.first is not None:  # Of a quota that changes, what was spent is kept, and not what is left.
                self._rates.meet(charge.name, charge.limit, max(charge.first, charge.cost))
        return next((c for c in charges if not self._strategy(c).test(c.limit, c.name, cost=c.cost)), None)

    def spend(self, charges: Sequence[Charge]) -> None:
        """Pay all of them, right after `rejected` found none: then each has room, and it is all or nothing."""
        for charge in charges:
            self._strategy(charge).hit(charge.limit, charge.name, cost=charge.cost)

    def level(self, charge: Charge) -> WindowLevel:
        """How far its limit is used."""
        windows = self._quotas if charge.first is None else self._rates
        return windows.level(charge.name, charge.limit)

    def _strategy(self, charge: Charge) -> SlidingWindowCounterRateLimiter:
        return self._quota_strategy if charge.first is None else self._rate_strategy


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
    quotas = tuple(_quota(submission, name, amount / parts) for name, amount in limits.quotas)
    whole = _charge(Admission.TIER_LIMIT, tier.name, Bucket(REQUEST_BUCKET, tier.rate, tier.burst), 1, gateways)
    return Charges(key, buckets, quotas, (*([key] if key else []), *buckets, *quotas, whole))


def of_all(charges: Charges, together: Sequence[Submission]) -> Charges:
    """The same for requests which enter together or not at all."""
    sums = {
        charge.name: min(sum(map(bucket.kind.units, together)), charge.limit.amount)
        for charge, bucket in zip(charges.buckets, together[0].limits.buckets, strict=True)
        if bucket.kind.cost
    }
    every = [charge._replace(cost=sums.get(charge.name, charge.cost * len(together))) for charge in charges.every]
    return charges._replace(every=tuple(every))


def _charge(rejection: Admission, name: str, of: Bucket, units: int, gateways: int) -> Charge:
    unit = 1 if of.kind.cost else REQUEST
    limit, first = bucket(of.per_s / gateways, of.size / gateways, unit)
    # A request that is larger than the whole limit enters when all of it is there.
    cost = min(units, limit.amount) if of.kind.cost else units * unit
    return Charge(rejection, f"{rejection.value} {name}", limit, cost, first)


def _quota(submission: Submission, name: str, amount: float) -> Charge:
    mark, meter = unit_of(name).mark, submission.meter or Meter()
    cost = meter.units(mark, submission.tokens) if mark else 1
    return Charge(Admission.QUOTA, f"quota {name} {submission.customer_id}", quota(name, amount), cost)


class _Decision(NamedTuple):
    outcome: Admission
    retry_ms: int
    in_use: int
    shadowed: str = ""
    quota: str = ""  # The name of the one that rejects.


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
        rejection = self._rejection(submission, charges, now, in_use)
        if rejection is not None and not tier.shadow:
            decision = rejection
        elif not self._queue.has_room(priority):
            decision = _Decision(Admission.QUEUE_FULL, RETRY_MS, in_use)
        elif rejection is not None:
            decision = _Decision(Admission.ACCEPTED, 0, in_use + 1, rejection.outcome.value)
        else:
            self._limits.spend(charges.every)
            decision = _Decision(Admission.ACCEPTED, 0, in_use + 1)
        return self._verdict(submission, charges, decision, self._queue.ahead_of(priority))

    def keeps_out(
        self, together: Sequence[Submission], tier: TierLimit, priority: int, now: float, *, in_use: int
    ) -> Verdict | None:
        """The verdict on a list for all of which there is not enough; None where each may come. Nothing is spent."""
        first = together[0]
        charges = charges_of(first, tier, self._gateways)
        rejection = self._rejection(
            first, charges, now, in_use
        )  # A limit that is checked for the first time is checked for one request.
        if rejection is None:
            of_them = of_all(charges, together)
            rejection = self._rejection(first, of_them, now, in_use + len(together) - 1)
        if rejection is None or tier.shadow:
            return None
        return self._verdict(first, charges, rejection._replace(in_use=in_use), self._queue.ahead_of(priority))

    def _rejection(self, submission: Submission, charges: Charges, now: float, in_use: int) -> _Decision | None:
        """What the first limit says that refuses."""
        rejected = self._limits.rejected(charges.every, now)
        concurrency = submission.limits.max_concurrency
        most = max(1, concurrency // (self._gateways * cells_sharing(submission)))
        if concurrency and in_use >= most and (not rejected or rejected.rejection in _AFTER_CONCURRENCY):
            return _Decision(Admission.CONCURRENCY, RETRY_MS, in_use)
        if rejected is None:
            return None
        wait_us = self._limits.level(rejected).until_us(max(0, rejected.limit.amount - rejected.cost))
        quota_name = rejected.name.split()[1] if rejected.rejection is Admission.QUOTA else ""
        return _Decision(rejected.rejection, min(MOST_RETRY_MS, _ms(wait_us)), in_use, quota=quota_name)

    def _verdict(self, submission: Submission, charges: Charges, decision: _Decision, depth: int) -> Verdict:
        """The verdict has the whole of the client's limits, which it spreads over all gateways."""
        limits = submission.limits
        levels = [self._level(charge, of) for charge, of in zip(charges.buckets, limits.buckets, strict=True)]
        if charges.key is not None and limits.key is not None:
            levels[0] = min(levels[0], self._level(charges.key, limits.key))
        in_use = decision.in_use
        if limits.max_concurrency:
            in_use = min(limits.max_concurrency, in_use * self._gateways)
        quotas = [self._quota(charge, each[1]) for charge, each in zip(charges.quotas, limits.quotas, strict=True)]
        left = RemainingLimits(levels, in_use, quotas)
        named = (decision.quota,) if decision.quota else ()
        return Verdict(decision.outcome, left, decision.retry_ms, depth, shadowed=decision.shadowed, quotas=named)

    def _level(self, charge: Charge, of: Bucket) -> Level:
        level, unit = self._limits.level(charge), 1 if of.kind.cost else REQUEST
        left = max(0.0, (charge.limit.amount - level.used) / unit)
        return Level(min(of.size, left * self._gateways), _ms(level.until_us(0)))

    def _quota(self, charge: Charge, amount: int) -> tuple[int, int]:
        """What is left of a quota, and milliseconds until it starts anew."""
        level = self._limits.level(charge)
        left = max(0, int(charge.limit.amount - level.used))
        return min(amount, left * self._gateways), _ms(level.left_us)


def _ms(microseconds: float) -> int:
    return int(microseconds / 1000) + 1 if microseconds else 0
