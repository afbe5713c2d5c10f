"""The limits while Redis is away: this gateway's own share of each limit of a customer, a key and a tier. No I/O.

A token bucket of `burst` and `rate` becomes a sliding window that never lets through more than the bucket would. What
nobody knows here is how much was spent in Redis a moment ago:

* of requests and of tokens a quarter is there when a limit is first asked, and the rest comes within its window; the
  first request of everybody is let in,
* of a quota nothing counts as spent. To refuse a customer for a day whose quota may be hardly touched would hurt who
  did nothing wrong; what it can cost is the quota once more, and never a rate, since every other limit holds. What was
  spent of it here is kept from one time to the next: a Redis that comes and goes does not give it each time.

Tokens stay charged as they were estimated. All but quotas begins anew each time that direct mode begins; the number of
limits is bounded.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from limits import parse
from limits.strategies import SlidingWindowCounterRateLimiter

from ratelimit.sliding_window import Level, LocalLimit, LocalWindows
from scheduler.protocol.admission import Submission, TierLimit
from scheduler.states import Admission

FIRST_FILL = 0.25
MAX_LIMITS = 40_000
"""Rates of some ten thousand customers, and as many quotas: 20 MB each, where so many come."""

REQUEST = 1000
"""Units that a request costs, so that the part of one that is free already is not lost in whole numbers."""

_LONGEST_S = 366 * 86_400.0


class Charge(NamedTuple):
    """What a request costs under one limit, and the refusal where there is not so much left."""

    refusal: Admission
    name: str
    limit: LocalLimit
    cost: int
    first: int | None = None  # Units that are there when it is first asked; None: nothing counts as spent.


class Charges(NamedTuple):
    """All that one request costs; `every` in the order in which a refusal is told."""

    key: Charge | None
    customer: Charge
    tokens: Charge | None
    quotas: tuple[Charge, ...]
    every: tuple[Charge, ...]


class LocalLimits:
    """What was spent here, under every limit. Times are monotonic seconds."""

    def __init__(self, max_limits: int = MAX_LIMITS) -> None:
        self._rates = LocalWindows(max_limits)
        self._quotas = LocalWindows(max_limits)
        self._rate_strategy = SlidingWindowCounterRateLimiter(self._rates)
        self._quota_strategy = SlidingWindowCounterRateLimiter(self._quotas)

    def __len__(self) -> int:
        return len(self._rates) + len(self._quotas)

    def clear(self) -> None:
        """Begin anew, with all but quotas."""
        self._rates.reset()

    def refused(self, charges: Sequence[Charge], now: float) -> Charge | None:
        """The first that has too little left. Nothing is spent."""
        self._rates.now_us = self._quotas.now_us = int(now * 1e6)
        for charge in charges:
            if charge.first is not None:  # Of a quota that changes, what was spent is kept, and not what is left.
                self._rates.meet(charge.name, charge.limit, max(charge.first, charge.cost))
        return next((c for c in charges if not self._strategy(c).test(c.limit, c.name, cost=c.cost)), None)

    def spend(self, charges: Sequence[Charge]) -> None:
        """Pay all of them, right after `refused` found none: then each has room, and it is all or nothing."""
        for charge in charges:
            self._strategy(charge).hit(charge.limit, charge.name, cost=charge.cost)

    def level(self, charge: Charge) -> Level:
        """How far its limit is used."""
        windows = self._quotas if charge.first is None else self._rates
        return windows.level(charge.name, charge.limit)

    def _strategy(self, charge: Charge) -> SlidingWindowCounterRateLimiter:
        return self._quota_strategy if charge.first is None else self._rate_strategy


@lru_cache(maxsize=4096)
def bucket(rate: float, burst: float, unit: int) -> tuple[LocalLimit, int]:
    """The window for a bucket of things that cost `unit`s, and how many units are there to begin with.

    What was spent in one window becomes free evenly over the next. So a window for one thing less than the bucket
    holds, as long as the rate takes for so many, lets through all of the rate as long as somebody who finds all but a
    little of one thing free may enter, and in no time more than the bucket would. It must hold one, so a bucket under
    two is held as one of two: both may come around the turn of a window, and then the rate holds again.
    """
    whole = max(2, int(burst))
    length_s = min(_LONGEST_S, (whole - 1) / rate) if rate > 0 else _LONGEST_S
    limit = LocalLimit(whole * unit - 1, max(1, math.ceil(length_s * 1e6)), (whole - 1) * unit)
    return limit, int(max(1.0, burst * FIRST_FILL) * unit)


@lru_cache(maxsize=1024)
def quota(period: str, amount: float) -> LocalLimit:
    """The window for a quota of requests in a period such as "1day"; a part of a request is one."""
    return LocalLimit(max(1, int(amount)), parse(f"1/{period}").get_expiry() * 1_000_000)


def charges_of(asked: Submission, tier: TierLimit, gateways: int) -> Charges:
    """What it costs at one of so many gateways, which has its part of each limit."""
    key = _requests(Admission.KEY_LIMIT, asked.api_key_id, asked.key_rate, asked.key_burst, gateways)
    customer = _requests(Admission.CUSTOMER_LIMIT, asked.customer_id, asked.rate, asked.burst, gateways)
    tokens = _tokens(asked, gateways)
    quotas = tuple(_quota(asked.customer_id, period, amount / gateways) for period, amount in asked.quotas)
    optional = [key] if asked.key_rate > 0 else []
    every = (*optional, customer, *([tokens] if tokens else []), *quotas, _tier(tier, gateways))
    return Charges(key if optional else None, customer, tokens, quotas, every)


def of_all(charges: Charges, tokens: int, count: int) -> Charges:
    """The same for `count` requests with so many tokens in all, which enter together or not at all."""

    def cost(charge: Charge) -> int:
        return min(tokens, charge.limit.amount) if charge is charges.tokens else charge.cost * count

    return charges._replace(every=tuple(charge._replace(cost=cost(charge)) for charge in charges.every))


def _requests(refusal: Admission, name: str, rate: float, burst: float, gateways: int) -> Charge:
    limit, first = bucket(rate / gateways, burst / gateways, REQUEST)
    return Charge(refusal, f"{refusal.value} {name}", limit, REQUEST, first)


def _tier(tier: TierLimit, gateways: int) -> Charge:
    return _requests(Admission.TIER_LIMIT, tier.name, tier.rate, tier.burst, gateways)


def _tokens(asked: Submission, gateways: int) -> Charge | None:
    if asked.tokens_per_minute <= 0:
        return None
    part = asked.tokens_per_minute / gateways
    limit, first = bucket(part / 60, part, 1)
    # What is larger than the whole limit enters when all of it is there.
    cost = min(asked.tokens, limit.amount)
    return Charge(Admission.TOKEN_LIMIT, f"token_limit {asked.customer_id}", limit, cost, first)


def _quota(customer_id: str, period: str, amount: float) -> Charge:
    return Charge(Admission.QUOTA, f"quota {period} {customer_id}", quota(period, amount), 1)
