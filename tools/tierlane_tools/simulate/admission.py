"""A model of admission: the decision of `scheduler/lua/admit.lua` for one request, on the limits that the gateway computes.

The limits are the system's: `ratelimit/limits.py` (`effective`), `gateway/limits/capacity.py` and `customer_limits.py`; so are
the order of admission, `ratelimit/decision.py`, and the buckets, `ratelimit/token_bucket.py`. Not modelled: limits of single
keys, metered quotas, Idempotency-Keys, requests that share a run.
"""

import math
from collections.abc import Mapping, Sequence
from random import Random

from gateway.inference.admission import AdmissionLimits
from ledger.catalog.snapshot import Identity
from ratelimit.decision import (
    TIER_LIMIT,
    BucketLevel,
    CustomerLevels,
    QuotaLevel,
    TierQueueState,
    decide,
    exceeds_depth,
)
from ratelimit.headers import quota_window_s
from ratelimit.limits import EffectiveLimits, Level, RemainingLimits
from ratelimit.quotas import is_metered
from ratelimit.token_bucket import StoredBucket, ms_until
from scheduler.protocol.admission import Submission, TierLimit, Verdict
from scheduler.states import Admission
from tierlane_tools.simulate.fair_queue import FairQueue

_SHED_RULES = (Admission.SHED, Admission.WAIT)


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

    def spent_in(self, quota: str, number: int) -> int:
        """The requests in a window of a quota."""
        window, spent = self.spent.get(quota, (number, 0))
        return spent if window == number else 0


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
        if limits is not self._limits:
            self._limits, self._tiers = limits, {tier.name: tier for tier in limits.tiers}
        tier, effective = self._tiers[account.identity.tier], request.limits
        tier_bucket = self._tier_buckets.get(tier.name)
        if tier_bucket is None:
            tier_bucket = self._tier_buckets[tier.name] = StoredBucket(tier.burst, tier.rate)
        of_tier = BucketLevel(TIER_LIMIT, tier_bucket.level_at(now, tier.rate, tier.burst), 1)
        own = [
            BucketLevel(
                bucket.kind.outcome,
                stored.level_at(now, bucket.per_s, bucket.size),
                min(bucket.kind.units(request), bucket.size) if bucket.kind.cost else 1,
            )
            for stored, bucket in zip(account.buckets, effective.buckets, strict=True)
        ]
        windows = [(name, amount, *_window(name, now)) for name, amount in effective.quotas]
        quotas = [
            QuotaLevel(math.inf if is_metered(name) else amount - account.spent_in(name, number), 1)
            for name, amount, number, _ in windows
        ]
        customer = CustomerLevels(own, account.in_use, effective.max_concurrency, quotas, account.identity.weight)
        queue = self._queue_state(account, request, tier, limits)
        is_full = exceeds_depth(tier, queue)
        decision = decide(customer, tier, of_tier, queue, is_full=is_full, draw=self._random.random)

        outcome, at, levels = Admission(decision.outcome), decision.at, [each.level for each in own]
        retry_ms = 0.0
        if outcome in _SHED_RULES:
            retry_ms = decision.wait_ms
        elif outcome is Admission.QUOTA:
            retry_ms = windows[at][3]
        elif outcome is Admission.TIER_LIMIT:
            retry_ms = ms_until(of_tier.level, of_tier.wanted, tier.rate)
        elif effective.bucket_of(outcome) is not None:
            retry_ms = ms_until(levels[at], own[at].wanted, effective.buckets[at].per_s)
        if decision.limit and decision.limit not in _SHED_RULES:
            self._store_changed_rates(account, effective, own, now)
            if tier_bucket.rate_changed(tier.rate) and of_tier.level < min(1.0, tier.burst):
                tier_bucket.store(of_tier.level, now, tier.rate)
        if outcome is Admission.ACCEPTED:
            account.in_use += 1
            if not decision.limit:
                levels = self._charge(account, request, levels, now)
                tier_bucket.store(of_tier.level - 1, now, tier.rate)
        remaining = RemainingLimits([Level(level, 0) for level in levels], account.in_use)
        depth = queue.depth + (outcome is Admission.ACCEPTED)
        return Verdict(outcome, remaining, round(retry_ms), depth, shadowed=decision.shadowed)

    def _queue_state(
        self, account: CustomerAccount, request: Submission, tier: TierLimit, limits: AdmissionLimits
    ) -> TierQueueState:
        queue = self._queues[tier.name]
        before_next: float = queue.depth
        if queue.in_backlogs:
            before_next = min(queue.depth, queue.queued + queue.own(account.number, account.identity.weight))
        return TierQueueState(
            queue.depth,
            queue.in_backlogs,
            queue.length(account.number),
            before_next,
            sum(self._queues[name].depth for name in tier.ahead if name != tier.name),
            queue.weights,
            limits.capacity_rps,
            min(request.queue_ms, request.total_ms - limits.run_ms),
        )

    def _charge(
        self, account: CustomerAccount, request: Submission, levels: Sequence[float], now: float
    ) -> list[float]:
        """Charge buckets and quotas; returns the new levels."""
        left = []
        for stored, bucket, level in zip(account.buckets, request.limits.buckets, levels, strict=True):
            left.append(level - bucket.kind.units(request))
            stored.store(left[-1], now, bucket.per_s)
        for name, _ in request.limits.quotas:
            number, _ = _window(name, now)
            account.spent[name] = number, account.spent_in(name, number) + 1
        return left

    def _store_changed_rates(
        self, account: CustomerAccount, effective: EffectiveLimits, own: Sequence[BucketLevel], now: float
    ) -> None:
        """A bucket that rejects is not written, unless its rate has changed: otherwise it would refill at the old rate."""
        found = list(zip(account.buckets, effective.buckets, own, strict=True))
        if any(stored.rate_changed(bucket.per_s) for stored, bucket, _ in found) and any(
            each.level < min(each.wanted, bucket.size) for _, bucket, each in found
        ):
            for stored, bucket, each in found:
                stored.store(each.level, now, bucket.per_s)


def _window(name: str, now: float) -> tuple[int, float]:
    """The number of the window of a quota that begins at the start of the simulation, and the ms until it ends."""
    length_s = quota_window_s(name)
    number = int(now // length_s)
    return number, ((number + 1) * length_s - now) * 1000
