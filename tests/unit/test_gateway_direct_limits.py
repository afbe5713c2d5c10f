"""Limits in direct mode: a gateway's share of every limit, all or nothing."""

from collections.abc import Sequence
from typing import Any

import pytest

from direct_parts import submission, waiting
from gateway.direct.limits import MOST_RETRY_MS, DirectAdmission, LocalLimits
from gateway.direct.queue import DirectEntry, DirectQueue
from ratelimit.quotas import Meter
from scheduler.protocol.admission import Submission, TierLimit, Verdict
from scheduler.states import Admission

WIDE = TierLimit("free", 1000.0, 1000.0, 100, ["free"])
SHADOW = TierLimit("free", 1000.0, 1000.0, 100, ["free"], shadow=True)
ACCEPTED = Admission.ACCEPTED


class Gateway:
    """Admission of one of `gateways` gateways in direct mode."""

    def __init__(self, gateways: int = 1, max_waiting: int = 10) -> None:
        self.limits = LocalLimits()
        self.queue = DirectQueue(max_waiting)
        self.admission = DirectAdmission(self.queue, self.limits)
        self.admission.open(gateways)

    def judge(
        self, request: Submission, tier: TierLimit = WIDE, now: float = 0.0, *, in_use: int = 0, priority: int = 1
    ) -> Verdict:
        return self.admission.judge(request, tier, priority, now, in_use=in_use)

    def outcomes(self, request: Submission, times: int, now: float = 0.0, **more: Any) -> list[Admission]:
        return [self.judge(request, now=now, **more).outcome for _ in range(times)]


def then(outcomes: Sequence[Admission], accepted: int, rejection: Admission) -> bool:
    """Whether so many are accepted, and all others are rejected for this reason."""
    return list(outcomes) == [ACCEPTED] * accepted + [rejection] * (len(outcomes) - accepted)


@pytest.mark.parametrize(("gateways", "accepted"), [(1, 25), (2, 12), (50, 1), (1000, 1)])
def test_a_gateway_starts_with_a_quarter_of_its_share(gateways: int, accepted: int) -> None:
    """What the customer spent in Redis shortly before is unknown. One request is always accepted.

    Leaving and entering direct mode starts anew.
    """
    gateway = Gateway(gateways)
    assert then(gateway.outcomes(submission(), 50), accepted, Admission.CUSTOMER_LIMIT)
    assert len(gateway.limits) == 2
    gateway.admission.close()
    assert len(gateway.limits) == 0

    gateway.admission.open(2)
    assert then(gateway.outcomes(submission(), 50, now=100.0), 12, Admission.CUSTOMER_LIMIT)


def test_keys_share_their_customers_limit() -> None:
    """A key's own limit is checked first, and what it rejects costs the customer nothing."""
    gateway = Gateway()
    own = submission(key_rate=4.0, key_burst=20.0)
    assert then(gateway.outcomes(own, 50), 5, Admission.KEY_LIMIT)
    verdict = gateway.judge(own)
    assert (verdict.left.buckets[0].left, verdict.outcome) == (0.0, Admission.KEY_LIMIT)
    assert then(gateway.outcomes(submission(api_key_id="other"), 30), 20, Admission.CUSTOMER_LIMIT)
    assert gateway.judge(submission(customer_id="other")).outcome is ACCEPTED


def test_a_rejection_has_the_wait_and_spends_nothing() -> None:
    """The wait is the time until the limit has room; the tier's share is whole after a customer was rejected."""
    gateway = Gateway(gateways=2)
    tier = TierLimit("narrow", 10.0, 8.0, 100, ["narrow"])  # One request here: a quarter of a half.
    poor = submission(rate=4.0, burst=4.0, customer_id="poor")
    assert gateway.judge(poor).outcome is ACCEPTED
    rejected = gateway.judge(poor, tier)
    assert (rejected.outcome, rejected.retry_after_ms) == (Admission.CUSTOMER_LIMIT, 501)
    assert (rejected.left.buckets[0].left, rejected.left.buckets[0].reset_ms) == (0.0, 1001)
    assert gateway.outcomes(submission(), 2, tier=tier) == [ACCEPTED, Admission.TIER_LIMIT]
    assert gateway.judge(poor, now=0.6).outcome is ACCEPTED


async def test_a_full_queue_rejects_without_spending() -> None:
    """A request of a higher tier is accepted, because it displaces another."""
    gateway = Gateway(max_waiting=1)
    gateway.queue.put(DirectEntry(waiting("first"), 2, 0.0))

    rejected = gateway.judge(submission(), priority=2)
    assert (rejected.outcome, rejected.retry_after_ms) == (Admission.QUEUE_FULL, 500)
    assert rejected.left.buckets[0].left == 25.0
    assert gateway.judge(submission()).outcome is ACCEPTED


def test_tokens_are_charged_by_the_estimate() -> None:
    """A request larger than the whole limit waits until all of it is available. Without a limit nothing is charged."""
    gateway = Gateway(gateways=2)
    request = submission(tokens=50, tokens_per_minute=1202.0)  # 601 here: a window of a minute for 600.
    assert then(gateway.outcomes(request, 5), 3, Admission.TOKEN_LIMIT)
    verdict = gateway.judge(request)
    assert (verdict.left.buckets[1].left, verdict.left.buckets[1].reset_ms) == (0.0, pytest.approx(120_000, abs=60_000))
    assert verdict.retry_after_ms == pytest.approx(50 / 450 * 60_000, rel=0.01)

    huge = submission(customer_id="big", tokens=5000, tokens_per_minute=1202.0)
    assert then(gateway.outcomes(huge, 2), 1, Admission.TOKEN_LIMIT)
    assert gateway.judge(huge, now=115.0).outcome is Admission.TOKEN_LIMIT
    assert gateway.judge(huge, now=121.0).outcome is ACCEPTED
    unlimited = gateway.judge(submission(customer_id="free", tokens=5_000_000))
    assert (unlimited.outcome, len(unlimited.left.buckets)) == (ACCEPTED, 1)


@pytest.mark.parametrize(
    ("changes", "most", "rejection"),
    [
        ({"burst": 20.0, "rate": 0.001}, 5, Admission.CUSTOMER_LIMIT),
        ({"key_burst": 12.0, "key_rate": 0.001}, 3, Admission.KEY_LIMIT),
        ({"max_concurrency": 4}, 4, Admission.CONCURRENCY),
        ({"quotas": (("1day", 3),)}, 3, Admission.QUOTA),
        ({"tokens": 50, "tokens_per_minute": 601.0}, 3, Admission.TOKEN_LIMIT),
    ],
)
def test_a_list_is_accepted_whole_or_not_at_all(changes: dict[str, Any], most: int, rejection: Admission) -> None:
    """A list with one request too many is rejected and spends nothing."""
    gateway, request = Gateway(), submission(**changes)
    verdict = gateway.admission.keeps_out([request] * (most + 1), WIDE, 1, 0.0, in_use=0)

    assert verdict is not None
    assert verdict.outcome is rejection
    assert gateway.admission.keeps_out([request] * most, WIDE, 1, 0.0, in_use=0) is None
    assert [gateway.judge(request, in_use=n).outcome for n in range(most)] == [ACCEPTED] * most
    assert gateway.judge(request, in_use=most).outcome is rejection


@pytest.mark.parametrize(("gateways", "most"), [(1, 8), (3, 2), (20, 1)])
def test_concurrency_is_shared_by_gateways(gateways: int, most: int) -> None:
    """Each has its share, at least one. The verdict has an estimate for the customer in all; 0 is no limit."""
    request = submission(max_concurrency=8)
    verdicts = [Gateway(gateways).judge(request, in_use=count) for count in (most - 1, most)]

    assert [verdict.outcome for verdict in verdicts] == [ACCEPTED, Admission.CONCURRENCY]
    assert [verdict.left.in_use for verdict in verdicts] == [min(8, most * gateways)] * 2
    assert verdicts[1].retry_after_ms == 500
    assert Gateway().judge(submission(), in_use=1000).outcome is ACCEPTED


def test_metered_quotas_are_charged_the_estimate() -> None:
    """GPU time, tokens and money, without a settlement; the quota without room is named."""
    gateway = Gateway(gateways=2)
    quotas = [("1day:gpu", 100_000), ("1day:tokens", 10_000), ("1month:usd", 10**12)]
    request = submission(quotas=quotas, meter=Meter(20_000, 0.5, 0.002), tokens=100)
    verdicts = [gateway.judge(request) for _ in range(4)]

    assert then([verdict.outcome for verdict in verdicts], 2, Admission.QUOTA)
    assert [left for left, _ in verdicts[1].left.quotas] == [20_000, 9_600, 10**12 - 4 * (20_000 * 500 + 100 * 2000)]
    assert verdicts[2].quotas == ("1day:gpu",)


def test_quotas_are_kept_between_outages() -> None:
    """The share is available from the start, a raised quota keeps what was spent, and so does the next outage."""
    gateway = Gateway(gateways=2)
    request = submission(quotas=[("1day", 8), ("1month", 100)])
    verdicts = [gateway.judge(request) for _ in range(6)]
    assert then([verdict.outcome for verdict in verdicts], 4, Admission.QUOTA)
    assert verdicts[0].left.quotas == [(6, 86_400_001), (98, 31 * 86_400_000 + 1)]
    assert verdicts[-1].left.quotas == [(0, 86_400_001), (92, 31 * 86_400_000 + 1)]
    assert verdicts[-1].retry_after_ms == MOST_RETRY_MS
    raised = submission(quotas=[("1day", 12), ("1month", 100)])
    assert then(gateway.outcomes(raised, 3), 2, Admission.QUOTA)
    assert then(gateway.outcomes(submission(customer_id="small", quotas=[("1day", 1)]), 2), 1, Admission.QUOTA)

    gateway.admission.close()
    gateway.admission.open(2)
    assert gateway.judge(request, now=3600.0).outcome is Admission.QUOTA
    assert gateway.judge(request, now=3 * 86_400.0).outcome is ACCEPTED


ROOMY: dict[str, Any] = {
    "key_rate": 100.0,
    "key_burst": 100.0,
    "tokens": 100,
    "tokens_per_minute": 1e6,
    "quotas": [("1day", 1000)],
    "max_concurrency": 100,
}
NARROW: dict[Admission, dict[str, Any]] = {
    Admission.KEY_LIMIT: {"key_rate": 0.01, "key_burst": 1.0},
    Admission.CUSTOMER_LIMIT: {"rate": 0.01, "burst": 1.0},
    Admission.TOKEN_LIMIT: {"tokens_per_minute": 100.0},
    Admission.CONCURRENCY: {"max_concurrency": 1},
    Admission.QUOTA: {"quotas": [("1day", 1)]},
    Admission.TIER_LIMIT: {},
}
"""In the order of admission: limits that reject the second request."""
REJECTIONS = list(NARROW)


def narrow_tier(*, shadow: bool = False) -> TierLimit:
    return TierLimit("narrow", 0.01, 1.0, 100, ["narrow"], shadow=shadow)


def narrow(*rejections: Admission) -> Submission:
    """A request whose repetition these limits reject."""
    changes = ROOMY
    for rejection in rejections:
        changes = changes | NARROW[rejection]
    return submission(**changes)


@pytest.mark.parametrize("rejection", REJECTIONS)
def test_a_rejection_by_one_limit_spends_nothing_of_the_others(rejection: Admission) -> None:
    """After a hundred rejections every limit is as it was after the accepted request."""
    gateway, request = Gateway(), narrow(rejection)
    tier = narrow_tier() if rejection is Admission.TIER_LIMIT else WIDE
    first, *others = [gateway.judge(request, tier, in_use=count) for count in [0] + [1] * 100]

    assert first.outcome is ACCEPTED
    assert {verdict.outcome for verdict in others} == {rejection}
    lefts = [verdict.left for verdict in (first, *others)]
    assert len({(each.buckets[0].left, each.buckets[1].left, tuple(each.quotas), each.in_use) for each in lefts}) == 1


@pytest.mark.parametrize("rejection", REJECTIONS)
def test_a_shadow_tier_accepts_and_reports_the_rejection(rejection: Admission) -> None:
    """The request is accepted without a charge; only a full queue rejects."""
    gateway, request = Gateway(), narrow(rejection)
    tier = narrow_tier(shadow=True) if rejection is Admission.TIER_LIMIT else SHADOW
    verdicts = [gateway.judge(request, tier, in_use=count) for count in (0, 1, 1)]

    assert [verdict.outcome for verdict in verdicts] == [ACCEPTED] * 3
    assert [verdict.shadowed for verdict in verdicts] == ["", rejection.value, rejection.value]
    assert [verdict.left.in_use for verdict in verdicts] == (
        [1] * 3 if rejection is Admission.CONCURRENCY else [1, 2, 2]
    )
    assert Gateway(max_waiting=0).judge(request, tier).outcome is Admission.QUEUE_FULL


@pytest.mark.parametrize("first", range(len(REJECTIONS)))
def test_limits_are_checked_in_the_order_of_admission(first: int) -> None:
    """Of several exhausted limits the first is reported: key, customer, tokens, concurrency, quota, tier."""
    gateway, request = Gateway(), narrow(*REJECTIONS[first:])
    gateway.judge(request, narrow_tier())

    assert gateway.judge(request, narrow_tier(), in_use=1).outcome is REJECTIONS[first]


def test_the_number_of_limits_is_bounded() -> None:
    """Whatever the number of customers and keys."""
    limits = LocalLimits(max_limits=30)
    admission = DirectAdmission(DirectQueue(), limits)
    for number in range(500):
        request = submission(customer_id=f"c{number}", api_key_id=f"k{number}", key_rate=1.0)
        admission.judge(request, WIDE, 1, 0.0, in_use=0)

    assert len(limits._rates) == 30
