"""The order of admission: what rejects a request, as a function of levels, counts and limits. Pure.

In Redis the scripts decide in this order (`scheduler/lua/includes/decisions.lua`, `ratelimit/lua/`), next to the state.
This module serves direct mode, without Redis, and simulations; a test compares it with the scripts. First the limits of key
and customer: buckets, concurrency, quotas; then the tier's bucket, shedding, and the depth of the queue.

A tier in shadow rejects only by the depth: `AdmissionDecision.shadowed` is the rejection that it would have returned.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ratelimit.limits import CONCURRENCY

ACCEPTED, QUOTA, TIER_LIMIT = "accepted", "quota", "tier_limit"
SHED, PREDICTED_WAIT, QUEUE_FULL = "shed", "predicted_wait", "queue_full"
"""Outcomes, as in `Admission` of scheduler/states.py; those of buckets are their `BucketLevel.outcome`."""

OPEN = 2
"""Open requests with which any customer is within its share of the tier, while no customer has a backlog."""

OPEN_PART = 4
"""The same for a customer of weight 1: this part of the tier's places, unless `open` of the tier is set."""


class BucketLevel(NamedTuple):
    """A bucket: what rejects where it has less than the `wanted` units, and its `level` now."""

    outcome: str
    level: float
    wanted: float


class QuotaLevel(NamedTuple):
    """A quota: the units that are left, and those that the request costs."""

    left: float
    cost: float


class CustomerLevels(NamedTuple):
    """What is left of a customer's limits. `buckets`: the key's, if it has one, then those of the customer.

    `in_use`: open requests, of which `max_concurrency` are allowed (0: no limit).
    """

    buckets: Sequence[BucketLevel]
    in_use: int = 0
    max_concurrency: int = 0
    quotas: Sequence[QuotaLevel] = ()
    weight: float = 1.0


class TierRules(Protocol):
    """The limits of a tier: `TierLimit` of scheduler/protocol/admission.py, which this package cannot import."""

    @property
    def rate(self) -> float: ...
    @property
    def burst(self) -> float: ...
    @property
    def max_depth(self) -> int: ...
    @property
    def shed_depth(self) -> int: ...
    @property
    def shed_wait_ms(self) -> int: ...
    @property
    def share(self) -> float: ...
    @property
    def shadow(self) -> bool: ...
    @property
    def places(self) -> int: ...
    @property
    def open(self) -> float: ...


class TierQueueState(NamedTuple):
    """The queue of a tier, for one customer.

    `depth`: requests of the tier that wait, of which `in_backlogs` in the backlogs of customers, `own` in that of the customer;
    `before_next`: how many of them leave before the customer's next one, at most. `above`: requests that wait in higher tiers.
    `weights`: the sum for customers with a backlog. `capacity` in requests/s, 0 if unknown; `longest_ms`: the longest wait.
    """

    depth: int
    in_backlogs: int
    own: int
    before_next: float
    above: int
    weights: float
    capacity: float
    longest_ms: float


class AdmissionDecision(NamedTuple):
    """`limit`: what rejects, or would in a tier that is not in shadow; "" if nothing does.

    `at`: the position of the bucket or quota that rejects. `wait_ms`: the predicted wait, if the limit is a shed rule.
    """

    outcome: str
    limit: str = ""
    at: int = 0
    wait_ms: float = 0.0

    @property
    def shadowed(self) -> str:
        """The rejection that a tier in shadow would have returned; "" for none."""
        return self.limit if self.outcome == ACCEPTED else ""


def decide(
    customer: CustomerLevels,
    tier: TierRules,
    tier_bucket: BucketLevel,
    queue: TierQueueState | None,
    *,
    is_full: bool,
    count: int = 1,
    draw: Callable[[], float] = float,
) -> AdmissionDecision:
    """The decision on `count` requests that are admitted together or not at all.

    `is_full`: the queue has no room (`exceeds_depth`, where there are backlogs). `queue`: None in direct mode, whose queue is
    short, has no backlogs, and displaces requests of lower tiers: no request is shed there, and every customer needs the
    tier's bucket. `draw`: 0..1, called if the request may be shed.
    """
    found = limit_that_rejects(customer, tier, tier_bucket, queue, count)
    if found is None and queue is not None:
        found = shed(tier, queue, draw)
    if found is not None and not tier.shadow:
        return found
    outcome = QUEUE_FULL if is_full else ACCEPTED
    return AdmissionDecision(outcome) if found is None else found._replace(outcome=outcome)


def limit_that_rejects(
    customer: CustomerLevels, tier: TierRules, tier_bucket: BucketLevel, queue: TierQueueState | None, count: int
) -> AdmissionDecision | None:
    """The first limit of key, customer and tier that has too little left; None if all have enough."""
    for at, (outcome, level, wanted) in enumerate(customer.buckets):
        if level < wanted:
            return AdmissionDecision(outcome, outcome, at)
    if 0 < customer.max_concurrency < customer.in_use + count:
        return AdmissionDecision(CONCURRENCY, CONCURRENCY)
    for at, (left, cost) in enumerate(customer.quotas):
        if left < cost:
            return AdmissionDecision(QUOTA, QUOTA, at)
    is_empty = tier_bucket.level < tier_bucket.wanted
    if is_empty and (queue is None or not is_within_share(customer, tier, tier_bucket.level, queue, count)):
        return AdmissionDecision(TIER_LIMIT, TIER_LIMIT)
    return None


def is_within_share(
    customer: CustomerLevels, tier: TierRules, tier_level: float, queue: TierQueueState, count: int = 1
) -> bool:
    """Whether a customer has no more than its part of the backlogs, by weight, or, without backlogs, few open requests.

    Such a customer is not rejected because others have emptied the bucket of the tier: the bucket goes into debt, of at
    most its size.
    """
    weight = customer.weight
    if tier_level - count < -tier.burst:
        return False
    if not queue.in_backlogs:
        most = max(OPEN, weight * (tier.open or tier.places / OPEN_PART))
        return customer.max_concurrency > 0 and customer.in_use + count <= most
    weights = queue.weights + (0.0 if queue.own else weight)
    return queue.own + count <= max(1.0, queue.in_backlogs * weight / max(weights, weight))


def shed(tier: TierRules, queue: TierQueueState, draw: Callable[[], float]) -> AdmissionDecision | None:
    """The rejection by a shed rule of the tier, with rising probability, or because the predicted wait is too long."""
    own, capacity, share = queue.before_next, queue.capacity, tier.share
    ahead = queue.above + own
    if share > 0:
        ahead = min(ahead, own / share)
    wait_ms = 0.0
    if capacity > 0:
        wait_s = queue.above / capacity + own / max(min(tier.rate, capacity), share * capacity, 0.001)
        wait_ms = 1000 * (min(wait_s, own / (share * capacity)) if share > 0 else wait_s)
    chance = max(shed_chance(ahead, tier.shed_depth), shed_chance(wait_ms, tier.shed_wait_ms))
    if chance > 0 and chance > draw():
        return AdmissionDecision(SHED, SHED, wait_ms=wait_ms)
    if wait_ms > 0 and wait_ms >= queue.longest_ms:
        return AdmissionDecision(PREDICTED_WAIT, PREDICTED_WAIT, wait_ms=wait_ms)
    return None


def shed_chance(value: float, limit: float) -> float:
    """The probability of shedding: 0 up to half of the limit, 1 from the limit on, with a quadratic rise between."""
    if limit < 0:
        return 0.0
    over = max(0.0, 2 * value / limit - 1) if limit else float(value > 0)
    return 1.0 if over >= 1 else over * over


def exceeds_depth(tier: TierRules, queue: TierQueueState, count: int = 1) -> bool:
    """Whether the tier is full for a customer. One with less than its fair share may exceed the depth, which others have
    reached; the tier never has more than twice as many.
    """
    total = queue.depth + count
    if total <= tier.max_depth:
        return False
    return not queue.in_backlogs or total > 2 * tier.max_depth or queue.before_next + count > tier.max_depth
