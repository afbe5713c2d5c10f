"""A model of admission: the decision of `scheduler/lua/admit.lua` for one request, on the limits that the gateway computes.

The limits themselves are the system's: `ratelimit/limits.py` (`effective`), `gateway/limits/capacity.py` and `customer_limits.py`. The checks are in
Lua (`scheduler/lua/includes/decisions.lua`, `ratelimit/lua/`), so they are written again here, in the same order: the
customer's buckets, its concurrency, its quotas of requests, the tier's bucket, shedding, the depth of the queue. Not
modelled: limits of single keys, metered quotas, Idempotency-Keys, requests that share a run.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from gateway.inference.admission import AdmissionLimits
from ledger.catalog.snapshot import Identity
from ratelimit.headers import quota_window_s
from ratelimit.limits import EffectiveLimits, Level, RemainingLimits
from ratelimit.quotas import is_metered
from scheduler.protocol.admission import Submission, TierLimit, Verdict
from scheduler.states import Admission
from tierlane_tools.simulate.fair_queue import FairQueue

OPEN_PART, OPEN = 4, 2
"""A customer without a backlog is within its share with this part of the places, and with at least so many open requests."""
_DAY_MS = 86_400_000


class StoredBucket:
    """A token bucket as the scripts store it: the level when it was written, and the rate then. Times in seconds."""

    __slots__ = ("at", "level", "per_s")

    def __init__(self, level: float, per_s: float) -> None:
        self.level = level
        self.per_s = per_s
        self.at = 0.0

    def refilled(self, now: float, per_s: float, size: float) -> float:
        """The level now: since it was written, the lower of the two rates counts."""
        return min(size, self.level + (now - self.at) * min(self.per_s, per_s))

    def store(self, now: float, level: float, per_s: float) -> None:
        """Write it."""
        self.at, self.level, self.per_s = now, level, per_s

    def changed(self, per_s: float) -> bool:
        """Whether its rate differs by more than 1 % from the stored one."""
        return abs(self.per_s - per_s) > per_s / 100


class CustomerAccount:
    """One simulated customer: its identity, what is left of its limits, and its open requests. `number`: its index."""

    __slots__ = ("buckets", "class_name", "identity", "in_use", "number", "spent")

    def __init__(self, number: int, identity: Identity, class_name: str, limits: EffectiveLimits) -> None:
        self.number = number
        self.identity = identity
        self.class_name = class_name
        self.buckets = [StoredBucket(bucket.size, bucket.per_s) for bucket in limits.buckets]  # Full at the start.
        self.in_use = 0
        self.spent: dict[str, tuple[int, int]] = {}
        """Of each quota, the number of the window and the requests in it."""


class Levels(NamedTuple):
    """The levels of the customer's buckets now, and the tier's bucket with its level."""

    own: list[float]
    tier_bucket: StoredBucket
    of_tier: float


class AdmissionModel:
    """The decisions of one cell. `queues`: by tier."""

    def __init__(self, queues: Mapping[str, FairQueue], random: Random) -> None:
        self._queues = queues
        self._random = random
        self._tier_buckets: dict[str, StoredBucket] = {}
        self._limits: AdmissionLimits | None = None
        self._tiers: dict[str, TierLimit] = {}

    def decide(
        self,
        account: CustomerAccount,
        request: Submission,
        limits: AdmissionLimits,
        now: float,
    ) -> Verdict:
        """The verdict; an accepted request is charged. The caller queues it, and releases `in_use` when it ends."""
        effective = request.limits
        if limits is not self._limits:
            self._limits, self._tiers = limits, {tier.name: tier for tier in limits.tiers}
        tier = self._tiers[account.identity.tier]
        own = [
            stored.refilled(now, bucket.per_s, bucket.size)
            for stored, bucket in zip(account.buckets, effective.buckets, strict=True)
        ]
        bucket = self._tier_buckets.get(tier.name)
        if bucket is None:
            bucket = self._tier_buckets[tier.name] = StoredBucket(tier.burst, tier.rate)
        levels = Levels(own, bucket, bucket.refilled(now, tier.rate, tier.burst))
        limit, retry_ms = self._limit(account, request, tier, levels, now)
        if limit is None:
            longest_ms = min(request.queue_ms, request.total_ms - limits.run_ms)
            limit, retry_ms = self._shed(account, tier, limits.capacity_rps, longest_ms)
        else:
            self._store_changed_rates(account, request, tier, levels, now)
        outcome = limit if limit is not None and not tier.shadow else Admission.ACCEPTED
        if outcome is Admission.ACCEPTED and self._is_full(account, tier):
            outcome, retry_ms = Admission.QUEUE_FULL, 0.0
        if outcome is Admission.ACCEPTED:
            account.in_use += 1
            if limit is None:
                own = self._charge(account, request, own, now)
                bucket.store(now, levels.of_tier - 1, tier.rate)
        remaining = RemainingLimits([Level(level, 0) for level in own], account.in_use)
        depth = self._queues[tier.name].depth + (outcome is Admission.ACCEPTED)
        shadowed = limit.value if outcome is Admission.ACCEPTED and limit is not None else ""
        return Verdict(outcome, remaining, round(retry_ms), depth, shadowed=shadowed)

    def _limit(
        self, account: CustomerAccount, request: Submission, tier: TierLimit, levels: Levels, now: float
    ) -> tuple[Admission | None, float]:
        """The limit that rejects, and the ms until it would not."""
        for bucket, level in zip(request.limits.buckets, levels.own, strict=True):
            wanted = min(bucket.kind.units(request), bucket.size) if bucket.kind.cost else 1
            if level < wanted:
                return Admission(bucket.kind.outcome), _ms_until(level, wanted, bucket.per_s)
        if 0 < request.limits.max_concurrency <= account.in_use:
            return Admission.CONCURRENCY, 0.0
        for name, amount in request.limits.quotas:
            number, until_ms = _window(name, now)
            known, spent = account.spent.get(name, (number, 0))
            if not is_metered(name) and known == number and spent >= amount:
                return Admission.QUOTA, until_ms
        if levels.of_tier < 1 and not self._is_within_share(account, request, tier, levels.of_tier):
            return Admission.TIER_LIMIT, _ms_until(levels.of_tier, 1, tier.rate)
        return None, 0.0

    def _is_within_share(
        self, account: CustomerAccount, request: Submission, tier: TierLimit, tier_level: float
    ) -> bool:
        """Whether a customer has no more than its part of the backlogs or, without any, few open requests."""
        queue, weight = self._queues[tier.name], account.identity.weight
        if tier_level - 1 < -tier.burst:
            return False
        if not queue.in_backlogs:
            return request.limits.max_concurrency > 0 and account.in_use + 1 <= max(
                OPEN, weight * (tier.open or tier.places / OPEN_PART)
            )
        length = queue.length(account.number)
        weights = queue.weights + (weight if not length else 0.0)
        return length + 1 <= max(1.0, queue.in_backlogs * weight / max(weights, weight))

    def _own_depth(self, account: CustomerAccount, tier: TierLimit) -> float:
        """How many requests of the tier leave before the next one of this customer, at most."""
        queue = self._queues[tier.name]
        if not queue.in_backlogs:
            return queue.depth
        return min(queue.depth, queue.queued + queue.own(account.number, account.identity.weight))

    def _shed(
        self, account: CustomerAccount, tier: TierLimit, capacity: float, longest_ms: float
    ) -> tuple[Admission | None, float]:
        """The rejections of ratelimit/lua/shedding.lua."""
        own = self._own_depth(account, tier)
        others = sum(self._queues[name].depth for name in tier.ahead if name != tier.name)
        ahead = min(others + own, own / tier.share) if tier.share > 0 else others + own
        wait_ms = 0.0
        if capacity > 0:
            rate = max(min(tier.rate, capacity), tier.share * capacity, 0.001)
            wait_s = others / capacity + own / rate
            wait_ms = 1000 * (min(wait_s, own / (tier.share * capacity)) if tier.share > 0 else wait_s)
        chance = max(shed_chance(ahead, tier.shed_depth), shed_chance(wait_ms, tier.shed_wait_ms))
        if chance > 0 and chance > self._random.random():
            return Admission.SHED, wait_ms
        if wait_ms > 0 and wait_ms >= longest_ms:
            return Admission.WAIT, wait_ms
        return None, 0.0

    def _is_full(self, account: CustomerAccount, tier: TierLimit) -> bool:
        """A customer with less than its fair share may exceed the depth of the tier, which others have reached."""
        queue = self._queues[tier.name]
        total = queue.depth + 1
        if total <= tier.max_depth:
            return False
        return (
            not queue.in_backlogs or total > 2 * tier.max_depth or self._own_depth(account, tier) + 1 > tier.max_depth
        )

    def _charge(
        self, account: CustomerAccount, request: Submission, levels: Sequence[float], now: float
    ) -> list[float]:
        """Charge buckets and quotas; returns the new levels."""
        left = []
        for stored, bucket, level in zip(account.buckets, request.limits.buckets, levels, strict=True):
            left.append(level - bucket.kind.units(request))
            stored.store(now, left[-1], bucket.per_s)
        for name, _ in request.limits.quotas:
            number, _ = _window(name, now)
            known, spent = account.spent.get(name, (number, 0))
            account.spent[name] = number, (spent if known == number else 0) + 1
        return left

    def _store_changed_rates(
        self, account: CustomerAccount, request: Submission, tier: TierLimit, levels: Levels, now: float
    ) -> None:
        """A bucket that rejects is not written, unless its rate has changed: otherwise it would refill at the old rate."""
        if levels.tier_bucket.changed(tier.rate) and levels.of_tier < min(1.0, tier.burst):
            levels.tier_bucket.store(now, levels.of_tier, tier.rate)
        pairs = list(zip(account.buckets, request.limits.buckets, levels.own, strict=True))
        if any(stored.changed(bucket.per_s) for stored, bucket, _ in pairs) and any(
            level < min(bucket.kind.units(request), bucket.size) for _, bucket, level in pairs
        ):
            for stored, bucket, level in pairs:
                stored.store(now, level, bucket.per_s)


def shed_chance(value: float, limit: float) -> float:
    """The probability of shedding: 0 up to half of the limit, 1 from the limit on, with a quadratic rise between."""
    if limit < 0:
        return 0.0
    over = max(0.0, 2 * value / limit - 1) if limit else float(value > 0)
    return 1.0 if over >= 1 else over * over


def _ms_until(level: float, wanted: float, per_s: float) -> float:
    return min(_DAY_MS, max(0.0, wanted - level) / per_s * 1000) if per_s > 0 else _DAY_MS


def _window(name: str, now: float) -> tuple[int, float]:
    """The number of the window of a quota that begins at the start of the simulation, and the ms until it ends."""
    length_s = quota_window_s(name)
    number = int(now // length_s)
    return number, ((number + 1) * length_s - now) * 1000
