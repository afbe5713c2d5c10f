"""A customer's limits at a gateway: effective limits, estimates without Redis, and the shadow of the base limits."""

from typing import Any

import pytest

from customer_limits import in_force, remaining
from direct_parts import submission
from gateway.limits.capacity import LiveLimits
from gateway.limits.customer_limits import CustomerLimits, LocalBuckets
from gateway.limits.demand import DemandMeter
from identities import identity
from ledger.catalog.snapshot import Identity
from ratelimit.limits import EffectiveLimits, Level, RemainingLimits, effective
from scheduler.protocol.admission import Verdict
from scheduler.states import Admission


class Buckets(LocalBuckets):
    """Local buckets with shorter calls."""

    def update(self, customer: Identity, left: RemainingLimits, now: float = 0.0, *, reduced: bool = True) -> None:
        self.note(customer, effective(customer), left, now, reduced=reduced)

    def left(self, customer: Identity, now: float, factor: float = 1.0) -> RemainingLimits:
        return self.estimate(customer, effective(customer, factor), now=now)

    def allows(self, customer: Identity, tokens: int = 1, now: float = 0.0, *, entered: bool = False) -> bool:
        return self.base_allows(customer, submission(tokens=tokens), now, entered=entered)


@pytest.mark.parametrize(
    ("changes", "factor", "expected"),
    [
        ({}, 0.5, in_force(1.0, 5.0, max_concurrency=5)),
        ({"burst": 1.0}, 0.1, in_force(0.2, 1.0, max_concurrency=5)),
        (
            {"tokens_per_minute": 600, "key_rate": 1.0, "key_burst": 4.0, "quotas": (("1day", 9),)},
            0.5,
            in_force(
                1.0, 5.0, tokens_per_minute=300.0, max_concurrency=5, quotas=(("1day", 9),), key_rate=0.5, key_burst=2.0
            ),
        ),
        (
            {"tokens_per_minute": 600, "key_rate": 1.0},
            0.0,
            in_force(0.0, 1.0, tokens_per_minute=1.0, max_concurrency=5, key_rate=1e-6, key_burst=1.0),
        ),
    ],
)
def test_the_factor_scales_rates_only(changes: dict[str, Any], factor: float, expected: EffectiveLimits) -> None:
    """Rate, burst, tokens and the key's limit; not concurrency and quotas. No scaled limit becomes "no limit"."""
    assert effective(identity(**changes), factor) == expected


def test_estimates_follow_the_last_verdict() -> None:
    """An unknown customer has a quarter of its buckets, as in Redis. Later the buckets refill and quota windows shrink."""
    known, customer = Buckets(), identity(tokens_per_minute=600, quotas=(("1day", 9),))
    assert known.left(customer, 100.0) == RemainingLimits([(2.5, 3750), (150.0, 45_000)])

    known.update(customer, remaining(4.0, tokens=Level(-60.0, 0), in_use=2, quotas=((7, 5000),)), 100.0)
    assert known.left(customer, 102.0, 0.5) == RemainingLimits([(5.0, 0), (-50.0, 70_000)], 2, ((7, 3000),))
    assert known.left(customer, 105.0).quotas == ()  # A new window, of which nothing is known.
    known.update(customer, remaining(3.0), 101.0)  # Direct mode does not know quotas.
    assert known.left(customer, 101.0).quotas == ((7, 4000),)


def test_headers_are_those_of_the_verdict_and_of_the_limits() -> None:
    """Another verdict and a changed limit are reported at once."""
    limits = CustomerLimits(LiveLimits("default"), DemandMeter("g1", 0.0), lambda: 0.0)
    first, second = (Verdict(Admission.ACCEPTED, remaining(left)) for left in (5.0, 4.0))
    calls = ((10.0, first), (10.0, second), (10.0, second), (10.0, first), (3.0, first))

    headers = [
        dict(line.split(": ", 1) for line in limits.lines(identity(burst=burst), verdict).splitlines())
        for burst, verdict in calls
    ]

    assert [each["x-ratelimit-remaining-requests"] for each in headers] == ["5", "4", "4", "5", "3"]
    assert [each["x-ratelimit-limit-requests"] for each in headers] == ["10", "10", "10", "10", "3"]


def test_the_estimate_of_a_tiny_rate_is_a_day_at_most() -> None:
    """The smallest rate that a row can hold would overflow otherwise."""
    known, customer = Buckets(), identity(requests_per_second=5e-324)
    known.update(customer, remaining(3.0), reduced=False)

    assert known.left(customer, 1.0).buckets == [(3.0, 86_400_000)]


def test_the_limit_of_one_key_is_not_that_of_its_customer() -> None:
    """A key's own bucket is used for that key only; other keys get the customer's, one request less."""
    known, own, other = Buckets(), identity(key_rate=1.0, key_burst=4.0), identity(key_id="other")
    known.update(other, remaining(8.0), 100.0)
    known.update(own, remaining(1.0), 100.0)

    assert known.left(own, 101.0).buckets[0].left == 2.0
    assert known.left(other, 100.0).buckets[0].left == 7.0


def test_the_base_limit_has_its_burst_and_its_rate() -> None:
    """It begins full, also for a new customer of a reduced tier; keys of a customer share it."""
    known, customer = Buckets(), identity(requests_per_second=1.0, burst=2.0)
    known.note(customer, effective(customer, 0.1), remaining(0.0), 0.0, reduced=True)
    second = identity(key_id="second", requests_per_second=1.0, burst=2.0)

    assert [known.allows(each, now=now) for each, now in ((customer, 0.0), (second, 0.0), (customer, 0.0))] == [
        True,
        True,
        False,
    ]
    assert [known.allows(customer, now=now) for now in (0.5, 1.0)] == [False, True]
    own = identity(customer_id="other", key_rate=0.1, key_burst=1.0)
    assert [known.allows(own) for _ in range(2)] == [True, False]


def test_base_tokens_are_refunded_when_not_used() -> None:
    """A minute's worth of tokens is available; unused tokens of an estimate are returned."""
    known, customer = Buckets(), identity(burst=100.0, tokens_per_minute=600)
    assert known.allows(customer, 500, entered=True)
    assert not known.allows(customer, 200)
    known.settle(customer, 450)
    assert known.allows(customer, 200)
    assert known.allows(identity(customer_id="new", tokens_per_minute=600), 10_000)


def test_the_base_bucket_follows_redis_while_nothing_is_reduced() -> None:
    """It starts from the state of the real bucket, which all gateways use."""
    known, customer = Buckets(), identity(tokens_per_minute=600)
    known.update(customer, remaining(1.5, tokens=Level(100.0, 0)), reduced=False)
    known.update(customer, remaining(0.0))

    assert [known.allows(customer, tokens) for tokens in (101, 50, 1)] == [False, True, False]


def test_the_number_of_customers_is_bounded() -> None:
    """The oldest is dropped."""
    known = Buckets(max_states=2)
    for name in "abc":
        known.update(identity(customer_id=name), remaining(0.0))

    assert len(known) == 2
    assert [known.left(identity(customer_id=name), 0.0).buckets[0].left for name in "ca"] == [0.0, 2.5]


def test_a_request_that_only_a_reduced_limit_rejects_is_demand() -> None:
    """Up to what the base limit accepts; an accepted request counts as one, and as two unreduced requests."""
    meter, customer = DemandMeter("g1", 0.0), identity()
    limits = CustomerLimits(LiveLimits("default"), meter, lambda: 0.0)
    for outcome in [Admission.ACCEPTED] + [Admission.CUSTOMER_LIMIT] * 20:
        meter.arrived(customer.tier, "acme")
        sent = submission(rate=1.0, burst=5.0)
        limits.judged(customer, sent, Verdict(outcome, remaining(0.0)))

    stats = meter.heartbeat([customer.tier], 1.0).tiers[customer.tier]
    assert (stats.arrived_rps, stats.demand_rps, stats.unreduced_rps) == (
        21.0,
        effective(customer).buckets[0].size,
        2.0,
    )
