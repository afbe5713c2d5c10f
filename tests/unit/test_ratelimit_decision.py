"""The order of admission as a function: which limit rejects, what a shadow tier reports, shed rules, share and depth."""

from typing import Any

import pytest

from ratelimit.decision import (
    ACCEPTED,
    PREDICTED_WAIT,
    QUEUE_FULL,
    QUOTA,
    SHED,
    TIER_LIMIT,
    AdmissionDecision,
    BucketLevel,
    CustomerLevels,
    QuotaLevel,
    TierQueueState,
    decide,
    exceeds_depth,
    is_within_share,
    shed,
    shed_chance,
)
from scheduler.protocol.admission import TierLimit
from scheduler.states import Admission

ORDER = ["key_limit", "customer_limit", "token_limit", "concurrency", QUOTA, TIER_LIMIT, SHED, QUEUE_FULL]


def tier_of(**changes: Any) -> TierLimit:
    fields: dict[str, Any] = {"rate": 10.0, "burst": 10.0, "max_depth": 100, "ahead": ["free"]}
    return TierLimit("free", **fields | changes)


def queue_of(**changes: Any) -> TierQueueState:
    fields: dict[str, Any] = {
        "depth": 0,
        "in_backlogs": 0,
        "own": 0,
        "before_next": 0.0,
        "above": 0,
        "weights": 0.0,
        "capacity": 0.0,
        "longest_ms": 2000.0,
    }
    return TierQueueState(**fields | changes)


def decided(exhausted: list[str], *, shadow: bool = False, direct: bool = False) -> AdmissionDecision:
    """The decision on a request while these limits are exhausted."""

    def level(name: str) -> BucketLevel:
        return BucketLevel(name, 0.0 if name in exhausted else 1.0, 1.0)

    customer = CustomerLevels(
        [level("key_limit"), level("customer_limit"), level("token_limit")],
        in_use=2,
        max_concurrency=2 if "concurrency" in exhausted else 3,
        quotas=[QuotaLevel(9.0, 1.0), QuotaLevel(0.0 if QUOTA in exhausted else 5.0, 1.0)],
    )
    queue = queue_of(depth=50, in_backlogs=9, own=9, weights=1.0, before_next=50 if SHED in exhausted else 0.0)
    tier = tier_of(shed_depth=50, shadow=shadow)
    of_tier = level(TIER_LIMIT)._replace(level=-10.0 if TIER_LIMIT in exhausted else 1.0)
    return decide(customer, tier, of_tier, None if direct else queue, is_full=QUEUE_FULL in exhausted)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("first", range(len(ORDER) + 1))
def test_the_first_exhausted_limit_rejects(first: int, *, direct: bool) -> None:
    """Of all from one on, and alone; without any the request is accepted. Direct mode has no shed rules."""
    order = [name for name in ORDER if not direct or name != SHED]
    expected = order[first] if first < len(order) else ACCEPTED

    assert decided(order[first:], direct=direct).outcome == expected
    assert decided(order[first : first + 1], direct=direct).outcome == expected


@pytest.mark.parametrize("limit", ORDER[:-1])
def test_a_shadow_tier_rejects_by_its_depth_only(limit: str) -> None:
    """It reports what would have rejected."""
    accepted, full = decided([limit], shadow=True), decided([limit, QUEUE_FULL], shadow=True)

    assert (accepted.outcome, accepted.shadowed) == (ACCEPTED, limit)
    assert (full.outcome, full.shadowed) == (QUEUE_FULL, "")


def test_a_rejection_names_the_position_of_its_limit() -> None:
    """In the buckets, or in the quotas."""
    assert [decided([name]).at for name in ("customer_limit", "token_limit", QUOTA)] == [1, 2, 1]


def test_outcomes_are_those_of_admission() -> None:
    """As `Admission` of scheduler/states.py names them."""
    assert {ACCEPTED, PREDICTED_WAIT, *ORDER} <= {str(each.value) for each in Admission}


@pytest.mark.parametrize(
    ("customer", "tier", "queue", "level", "count", "expected"),
    [
        # Without backlogs: two open requests, or its part of the places; only with a limit of concurrency.
        ({"in_use": 1, "max_concurrency": 9}, {}, {}, 0.0, 1, True),
        ({"in_use": 16, "max_concurrency": 99}, {}, {}, 0.0, 1, False),
        ({"in_use": 15, "max_concurrency": 99}, {}, {}, 0.0, 1, True),
        ({"in_use": 15, "max_concurrency": 99}, {}, {}, 0.0, 2, False),
        ({"in_use": 3, "max_concurrency": 99}, {"open": 3.0}, {}, 0.0, 1, False),
        ({"in_use": 5, "max_concurrency": 99, "weight": 2.0}, {"open": 3.0}, {}, 0.0, 1, True),
        ({}, {}, {}, 0.0, 1, False),
        # The bucket of the tier is in debt by its size.
        ({"in_use": 0, "max_concurrency": 9}, {}, {}, -9.5, 1, False),
        # With backlogs: its part by weight, at least one.
        ({}, {}, {"in_backlogs": 9, "own": 2, "weights": 3.0}, 0.0, 1, True),
        ({}, {}, {"in_backlogs": 9, "own": 3, "weights": 3.0}, 0.0, 1, False),
        ({"weight": 2.0}, {}, {"in_backlogs": 9, "own": 5, "weights": 3.0}, 0.0, 1, True),
        ({}, {}, {"in_backlogs": 9, "own": 0, "weights": 100.0}, 0.0, 1, True),
        ({}, {}, {"in_backlogs": 9, "own": 0, "weights": 100.0}, 0.0, 2, False),
    ],
)
def test_a_customer_within_its_share(
    customer: dict[str, Any],
    tier: dict[str, Any],
    queue: dict[str, Any],
    level: float,
    count: int,
    *,
    expected: bool,
) -> None:
    """Its requests are accepted although the bucket of the tier is empty."""
    state, rules, waiting = CustomerLevels([], **customer), tier_of(**tier), queue_of(**queue)

    assert is_within_share(state, rules, level, waiting, count) is expected
    decision = decide(state, rules, BucketLevel(TIER_LIMIT, level, count), waiting, is_full=False, count=count)
    assert (decision.outcome == ACCEPTED) is expected


@pytest.mark.parametrize(
    ("tier", "queue", "draw", "expected", "wait_ms"),
    [
        ({}, {"before_next": 9e9}, 0.0, None, 0.0),
        ({"shed_depth": 100}, {"before_next": 50}, 0.0, None, 0.0),
        ({"shed_depth": 100}, {"before_next": 75}, 0.24, SHED, 0.0),
        ({"shed_depth": 100}, {"before_next": 75}, 0.25, None, 0.0),
        ({"shed_depth": 100}, {"before_next": 75, "above": 25}, 0.99, SHED, 0.0),
        ({"shed_depth": 100, "share": 0.5}, {"before_next": 25, "above": 99}, 0.0, None, 0.0),
        ({}, {"before_next": 10, "above": 5, "capacity": 5.0}, 0.0, PREDICTED_WAIT, 3000.0),
        ({}, {"before_next": 10, "above": 5, "capacity": 5.0, "longest_ms": 3001}, 0.0, None, 0.0),
        ({"share": 0.8}, {"before_next": 10, "above": 99, "capacity": 5.0}, 0.0, PREDICTED_WAIT, 2500.0),
        ({"shed_wait_ms": 3000}, {"before_next": 10, "above": 5, "capacity": 5.0}, 0.99, SHED, 3000.0),
    ],
)
def test_shed_rules(
    tier: dict[str, Any], queue: dict[str, Any], draw: float, expected: str | None, wait_ms: float
) -> None:
    """Requests ahead and the predicted wait, both at most at the rate of the guaranteed share."""
    found = shed(tier_of(**tier), queue_of(**queue), lambda: draw)

    assert (found and found.outcome, found.wait_ms if found else 0.0) == (expected, wait_ms)


def test_the_chance_of_shedding_rises_from_half_of_the_limit() -> None:
    """Quadratically; without a limit it is 0."""
    assert [shed_chance(value, 100) for value in (0, 50, 75, 100, 200)] == [0.0, 0.0, 0.25, 1.0, 1.0]
    assert [shed_chance(1, -1), shed_chance(0, 0), shed_chance(1, 0)] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        ({"depth": 99}, False),
        ({"depth": 100}, True),
        ({"depth": 100, "in_backlogs": 50, "before_next": 99.0}, False),
        ({"depth": 100, "in_backlogs": 50, "before_next": 99.5}, True),
        ({"depth": 199, "in_backlogs": 50, "before_next": 1.0}, False),
        ({"depth": 200, "in_backlogs": 50, "before_next": 1.0}, True),
    ],
)
def test_the_depth_of_a_tier(queue: dict[str, Any], *, expected: bool) -> None:
    """A customer with less than its share may exceed it, up to twice the depth."""
    assert exceeds_depth(tier_of(), queue_of(**queue)) is expected
