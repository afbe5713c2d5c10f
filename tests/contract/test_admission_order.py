"""The order of admission: a table of exhausted limits through the script and through `ratelimit/decision.py`."""

from itertools import combinations
from typing import Any

import pytest

from pool import TIERS, Pool
from ratelimit.decision import BucketLevel, CustomerLevels, QuotaLevel, TierQueueState, decide, exceeds_depth
from ratelimit.limits import FRESH
from scheduler.protocol.admission import Submission, TierLimit
from scheduler.states import Admission

NO_REFILL = 1e-6
EXHAUSTED: dict[Admission, dict[str, Any]] = {
    Admission.KEY_LIMIT: {"key_rate": NO_REFILL, "key_burst": 4.0},
    Admission.CUSTOMER_LIMIT: {"rate": NO_REFILL, "burst": 4.0},
    Admission.TOKEN_LIMIT: {"tokens_per_minute": 4 * 100.0},
    Admission.CONCURRENCY: {"max_concurrency": 1},
    Admission.QUOTA: {"quotas": (("1year", 5), ("1day", 1))},
    Admission.TIER_LIMIT: {"rate": NO_REFILL, "burst": 4.0},
    Admission.SHED: {"shed_depth": 1},
    Admission.QUEUE_FULL: {"max_depth": 1},
}
"""In the order of admission: limits that reject the second request."""
OF_TIER = {Admission.TIER_LIMIT, Admission.SHED, Admission.QUEUE_FULL}
CASES = [set[Admission]()] + [set(some) for size in (1, 2, 8) for some in combinations(EXHAUSTED, size)]


def level(name: str, burst: float, cost: float) -> BucketLevel:
    """A bucket that began at a quarter, after one request of this cost."""
    return BucketLevel(name, burst * FRESH - cost, min(cost, burst))


def decided(request: Submission, tier: TierLimit) -> tuple[str, str]:
    """The decision of the function on the second of two equal requests."""
    limits, buckets = request.limits, list[BucketLevel]()
    if limits.key is not None:
        buckets.append(level(Admission.KEY_LIMIT, limits.key.size, 1))
    buckets += [level(b.kind.outcome, b.size, b.kind.units(request)) for b in limits.buckets]
    quotas = [QuotaLevel(amount - 1, 1) for _, amount in limits.quotas]
    customer = CustomerLevels(buckets, 1, limits.max_concurrency, quotas)
    queue = TierQueueState(1, 0, 0, 1, 0, 0.0, 0.0, request.queue_ms)
    of_tier = level(Admission.TIER_LIMIT, tier.burst, 1)
    found = decide(customer, tier, of_tier, queue, is_full=exceeds_depth(tier, queue))
    return found.outcome, found.shadowed


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("exhausted", CASES, ids=lambda case: "-".join(sorted(case)) or "none")
async def test_the_function_decides_as_the_script(pool: Pool, exhausted: set[Admission], *, shadow: bool) -> None:
    """None, each one, each two, and all exhausted: the same outcome, and the same rejection of a tier in shadow."""
    fields: dict[str, Any] = {"tokens": 100}
    rules: dict[str, Any] = {"rate": 1e6, "burst": 1e6, "max_depth": 1000, "shadow": shadow}
    for limit in exhausted:
        (rules if limit in OF_TIER else fields).update(EXHAUSTED[limit])
    tiers = [TierLimit(name, **rules, ahead=TIERS[: at + 1]) for at, name in enumerate(TIERS)]
    first, second = pool.submission(**fields), pool.submission(**fields)

    (accepted,) = await pool.admit([first], tiers)
    (verdict,) = await pool.admit([second], tiers)

    assert accepted.outcome is Admission.ACCEPTED
    assert (verdict.outcome, verdict.shadowed) == decided(second, tiers[-1])
    rejections = [limit for limit in EXHAUSTED if limit in exhausted]
    expected = rejections[0] if rejections and not shadow else Admission.ACCEPTED
    if shadow and Admission.QUEUE_FULL in exhausted:
        expected = Admission.QUEUE_FULL
    assert verdict.outcome is expected
