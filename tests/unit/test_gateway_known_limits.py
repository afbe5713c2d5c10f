"""What a gateway knows of limits without asking Redis: estimates for headers, and the shadow of the base limits."""

from typing import Any

import pytest

from customer_limits import in_force, remaining
from direct_parts import submission
from gateway.limits.customer_limits import LocalBuckets
from identities import identity
from ledger.catalog.snapshot import Identity
from ratelimit.limits import EffectiveLimits, Level, RemainingLimits, effective


def note(known: LocalBuckets, who: Identity, left: RemainingLimits, now: float, *, reduced: bool) -> None:
    known.note(who, effective(who), left, now, reduced=reduced)


def allows(known: LocalBuckets, who: Identity, tokens: int, now: float, *, entered: bool = False) -> bool:
    return known.base_allows(who, submission(tokens=tokens), now, entered=entered)


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
def test_rates_fall_with_the_factor_and_what_was_sold_does_not(
    changes: dict[str, Any], factor: float, expected: EffectiveLimits
) -> None:
    """Rate, burst, tokens and the key's own are scaled; concurrency and quotas are not; none becomes "no limit"."""
    assert effective(identity(**changes), factor) == expected


def test_a_customer_that_was_not_seen_is_announced_as_redis_would_begin_it() -> None:
    """A quarter of its buckets, nothing under way, and no guess at its quotas."""
    known, who = LocalBuckets(), identity(tokens_per_minute=600, quotas=(("1day", 9),))
    assert known.estimate(who, effective(who), now=100.0) == RemainingLimits([(2.5, 3750), (150.0, 45_000)])


def test_what_was_seen_refills_until_it_is_asked_for() -> None:
    """Requests and tokens at the rates in force now; the windows of quotas come nearer; leases stay as they were."""
    known, who = LocalBuckets(), identity(tokens_per_minute=600, quotas=(("1day", 9),))
    note(known, who, remaining(4.0, tokens=Level(-60.0, 0), in_use=2, quotas=((7, 5000),)), 100.0, reduced=True)

    assert known.estimate(who, effective(who, 0.5), now=102.0) == RemainingLimits(
        [(5.0, 0), (-50.0, 70_000)], 2, ((7, 3000),)
    )
    assert known.estimate(who, effective(who), now=105.0).quotas == ()  # A new window, of which nothing is known.


def test_a_bucket_that_hardly_fills_is_full_in_a_day_at_most() -> None:
    """The smallest rate that a row can hold, whose refill takes longer than any number says."""
    known, who = LocalBuckets(), identity(requests_per_second=5e-324)
    note(known, who, remaining(3.0), 0.0, reduced=False)

    assert known.estimate(who, effective(who), 1.0).buckets == [(3.0, 86_400_000)]


def test_quotas_are_remembered_through_a_verdict_that_knows_none() -> None:
    """Direct mode judges without them."""
    known, who = LocalBuckets(), identity(quotas=(("1day", 9),))
    note(known, who, remaining(4.0, quotas=((7, 5000),)), 100.0, reduced=True)
    note(known, who, remaining(3.0), 101.0, reduced=True)

    assert known.estimate(who, effective(who), now=101.0).quotas == ((7, 4000),)


def test_a_key_with_its_own_limit_does_not_speak_for_its_customer() -> None:
    """Its bucket is told to it alone; another key of the customer is told the customer's, one request less."""
    known, own, other = LocalBuckets(), identity(key_rate=1.0, key_burst=4.0), identity(key_id="other")
    note(known, other, remaining(8.0), 100.0, reduced=True)
    note(known, own, remaining(1.0), 100.0, reduced=True)

    assert known.estimate(own, effective(own), now=101.0).buckets[0].left == 2.0
    assert known.estimate(other, effective(other), now=100.0).buckets[0].left == 7.0


def test_the_base_bucket_empties_and_refills() -> None:
    """The shadow of the base limit lets its burst through, then its rate."""
    known, who = LocalBuckets(), identity(requests_per_second=1.0, burst=2.0)
    allowed = [allows(known, who, 1, at, entered=False) for at in (0.0, 0.0, 0.0, 0.5, 1.0)]

    assert allowed == [True, True, False, False, True]


def test_the_base_limit_is_one_for_all_keys_of_a_customer() -> None:
    """Two keys share the customer's bucket; a key's own limit comes on top."""
    known, first, second = LocalBuckets(), identity(burst=2.0), identity(key_id="second", burst=2.0)
    assert allows(known, first, 1, 0.0, entered=True)
    assert allows(known, second, 1, 0.0, entered=True)
    assert not allows(known, first, 1, 0.0, entered=False)

    own = identity(customer_id="other", key_rate=0.1, key_burst=1.0)
    assert [allows(known, own, 1, 0.0, entered=False) for _ in range(2)] == [True, False]


def test_tokens_have_a_shadow_too_and_get_back_what_was_not_used() -> None:
    """A minute's worth is there; what a request did not use of its estimate is there again."""
    known, who = LocalBuckets(), identity(burst=100.0, tokens_per_minute=600)
    assert allows(known, who, 500, 0.0, entered=True)
    assert not allows(known, who, 200, 0.0, entered=False)
    known.settle(who, 450)
    assert allows(known, who, 200, 0.0, entered=False)
    assert allows(known, identity(customer_id="new", tokens_per_minute=600), 10_000, 0.0, entered=False)


def test_while_nothing_is_lowered_the_shadow_is_what_redis_says() -> None:
    """So it begins where the real bucket stood, whichever gateway spent from it."""
    known, who = LocalBuckets(), identity(tokens_per_minute=600)
    note(known, who, remaining(1.5, tokens=Level(100.0, 0)), 0.0, reduced=False)
    note(known, who, remaining(0.0), 0.0, reduced=True)

    assert not allows(known, who, 101, 0.0, entered=False)
    assert allows(known, who, 50, 0.0, entered=False)
    assert not allows(known, who, 1, 0.0, entered=False)  # Half a request is left.


def test_the_shadow_of_a_customer_first_seen_under_reduced_limits_is_full() -> None:
    """It has the base size, not the reduced one: the first rejection is not counted against the customer."""
    known, who = LocalBuckets(), identity()
    known.note(who, effective(who, 0.1), remaining(0.0), 0.0, reduced=True)

    assert [allows(known, who, 1, 0.0) for _ in range(11)] == [True] * 10 + [False]


def test_states_are_bounded() -> None:
    """A flood of customers drops the oldest."""
    known = LocalBuckets(max_states=2)
    for name in "abc":
        note(known, identity(customer_id=name), remaining(0.0), 0.0, reduced=True)

    assert len(known) == 2
    newest = identity(customer_id="c")
    assert known.estimate(newest, effective(newest), 0.0).buckets[0].left == 0.0
    oldest = identity(customer_id="a")
    assert known.estimate(oldest, effective(oldest), 0.0).buckets[0].left == 2.5
