"""Shares of the capacity: literal tables, and what holds for every capacity, every set of tiers and every demand."""

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit.shares import TierShare, allocate, ceilings, factor

TIERS = (TierShare("enterprise", 1, 0.05), TierShare("paid", 2, 0.25), TierShare("free", 3, 0.10))
INF = math.inf


def by_tier(enterprise: float, paid: float, free: float) -> dict[str, float]:
    return {"enterprise": enterprise, "paid": paid, "free": free}


@pytest.mark.parametrize(
    ("capacity", "demand", "allocated"),
    [
        # nothing asked for, nothing given
        (100.0, {}, by_tier(0.0, 0.0, 0.0)),
        # enough for all
        (100.0, by_tier(10.0, 20.0, 30.0), by_tier(10.0, 20.0, 30.0)),
        # a share that nobody uses is lent, to the lowest tier as well
        (100.0, by_tier(0.0, 0.0, 500.0), by_tier(0.0, 0.0, 100.0)),
        (100.0, by_tier(500.0, 0.0, 0.0), by_tier(100.0, 0.0, 0.0)),
        # too little: free tightens first, down to its guarantee, then paid, then enterprise
        (100.0, by_tier(60.0, 25.0, 80.0), by_tier(60.0, 25.0, 15.0)),
        (100.0, by_tier(60.0, 40.0, 80.0), by_tier(60.0, 30.0, 10.0)),
        (100.0, by_tier(500.0, 500.0, 500.0), by_tier(65.0, 25.0, 10.0)),
        # half of it is gone: the same order
        (50.0, by_tier(20.0, 25.0, 80.0), by_tier(20.0, 25.0, 5.0)),
        # who asks for less than its guarantee leaves the rest to the others
        (100.0, by_tier(500.0, 10.0, 2.0), by_tier(88.0, 10.0, 2.0)),
        # demand without end
        (100.0, by_tier(INF, INF, INF), by_tier(65.0, 25.0, 10.0)),
        (100.0, by_tier(20.0, 0.0, INF), by_tier(20.0, 0.0, 80.0)),
        # what is not a number, or less than nothing, asks for nothing
        (100.0, by_tier(math.nan, -5.0, 500.0), by_tier(0.0, 0.0, 100.0)),
        (0.0, by_tier(5.0, INF, 0.0), by_tier(0.0, 0.0, 0.0)),
        (-1.0, by_tier(5.0, 5.0, 5.0), by_tier(0.0, 0.0, 0.0)),
    ],
)
def test_allocation(capacity: float, demand: dict[str, float], allocated: dict[str, float]) -> None:
    """Guaranteed shares first, then by priority; unused share is lent. In which order tiers are named does not matter."""
    for tiers in permutations(TIERS):
        assert allocate(capacity, tiers, demand) == pytest.approx(allocated)


@pytest.mark.parametrize(
    ("capacity", "demand", "ceiling"),
    [
        # nobody is there: whoever comes may have it all
        (100.0, {}, by_tier(100.0, 100.0, 100.0)),
        # free floods: the idle tiers above it may begin with all but its guarantee, and free has what they leave
        (100.0, by_tier(0.0, 0.0, 1000.0), by_tier(90.0, 90.0, 100.0)),
        # enterprise floods: each of the others may begin with its guarantee
        (100.0, by_tier(1000.0, 0.0, 0.0), by_tier(100.0, 25.0, 10.0)),
        (100.0, by_tier(10.0, 20.0, 30.0), by_tier(70.0, 80.0, 70.0)),
        (100.0, by_tier(500.0, 500.0, 500.0), by_tier(65.0, 25.0, 10.0)),
        (0.0, by_tier(5.0, 5.0, 5.0), by_tier(0.0, 0.0, 0.0)),
    ],
)
def test_ceilings(capacity: float, demand: dict[str, float], ceiling: dict[str, float]) -> None:
    """What each would get if it asked for everything: an idle tier is not locked out by those who use its share."""
    assert ceilings(capacity, TIERS, demand) == pytest.approx(ceiling)


@pytest.mark.parametrize(
    ("shares", "allocated"),
    [
        ((0.5, 0.3, 0.2), (50.0, 30.0, 20.0)),
        ((0.0, 0.0, 1.0), (0.0, 0.0, 100.0)),
        ((0.0, 0.0, 0.0), (100.0, 0.0, 0.0)),
        # more is guaranteed than there is: the higher tier's guarantee holds
        ((0.8, 0.5, 0.5), (80.0, 20.0, 0.0)),
        ((1.0, 1.0, 1.0), (100.0, 0.0, 0.0)),
    ],
)
def test_shares_of_the_whole(shares: tuple[float, ...], allocated: tuple[float, ...]) -> None:
    """Guarantees that are all there is, or more."""
    tiers = [TierShare(tier.name, tier.priority, share) for tier, share in zip(TIERS, shares, strict=True)]

    assert allocate(100.0, tiers, by_tier(INF, INF, INF)) == pytest.approx(by_tier(*allocated))


def test_who_gets_all_gets_exactly_that() -> None:
    """0.1 + 0.2 is more than 0.3 in floating point: no such error may lower a limit."""
    demand = by_tier(0.1, 0.2, 0.3)

    assert allocate(7.0, TIERS, demand) == demand


@pytest.mark.parametrize(
    ("allocated", "demand", "kept"),
    [(50.0, 0.0, 1.0), (50.0, 40.0, 1.0), (25.0, 100.0, 0.25), (0.0, 10.0, 0.0), (50.0, INF, 0.0), (0.0, 0.0, 1.0)],
)
def test_factor(allocated: float, demand: float, kept: float) -> None:
    """A tier that gets all it asks for keeps its customers' full limits."""
    assert factor(allocated, demand) == kept


CAPACITY = st.floats(0, 1e6)
DEMAND = st.lists(st.one_of(st.floats(0, 1e6), st.just(INF)), min_size=6, max_size=6)


@st.composite
def tier_sets(draw: st.DrawFn, most: float = 1.0) -> list[TierShare]:
    """Up to six tiers, two of which may have one priority, with shares that add up to at most `most`."""
    parts = draw(st.lists(st.integers(0, 100), min_size=1, max_size=6))
    scale = draw(st.floats(0, most)) / max(1, sum(parts))
    priorities = draw(st.lists(st.integers(1, 4), min_size=len(parts), max_size=len(parts)))
    return [TierShare(f"t{i}", priorities[i], min(1.0, parts[i] * scale)) for i in range(len(parts))]


ANY_TIERS = st.one_of(tier_sets(), tier_sets(most=3.0))


def named(tiers: list[TierShare], demand: list[float]) -> dict[str, float]:
    return {tier.name: wanted for tier, wanted in zip(tiers, demand, strict=False)}


def slack(capacity: float) -> float:
    """What floating point may cost."""
    return 1e-9 * max(1.0, capacity)


@given(CAPACITY, ANY_TIERS, DEMAND)
def test_allocations_are_within_the_capacity_and_the_demand(
    capacity: float, tiers: list[TierShare], demand: list[float]
) -> None:
    """Together no more than there is, each no more than it asks for, and nothing kept back that somebody asks for."""
    asked = named(tiers, demand)
    allocated = allocate(capacity, tiers, asked)

    assert all(0 <= allocated[name] <= asked[name] for name in asked)
    assert sum(allocated.values()) <= capacity + slack(capacity)
    assert sum(allocated.values()) >= min(capacity, sum(asked.values())) - slack(capacity)


@given(CAPACITY, ANY_TIERS, DEMAND)
def test_a_higher_tier_never_loses_before_a_lower_one(
    capacity: float, tiers: list[TierShare], demand: list[float]
) -> None:
    """Where a tier gets less than it asks for, no tier of lower priority gets more than its guaranteed share."""
    asked = named(tiers, demand)
    allocated = allocate(capacity, tiers, asked)

    for higher in tiers:
        if allocated[higher.name] < asked[higher.name] - slack(capacity):
            for lower in tiers:
                if lower.priority > higher.priority:
                    assert allocated[lower.name] <= lower.guaranteed_share * capacity + slack(capacity)


@given(CAPACITY, tier_sets(), DEMAND)
def test_guaranteed_shares_hold(capacity: float, tiers: list[TierShare], demand: list[float]) -> None:
    """Whatever the others ask for, a tier gets what it asks for, or at least its share of the capacity."""
    asked = named(tiers, demand)
    allocated = allocate(capacity, tiers, asked)

    for tier in tiers:
        assert allocated[tier.name] >= min(asked[tier.name], tier.guaranteed_share * capacity) - slack(capacity)


@given(CAPACITY, CAPACITY, ANY_TIERS, DEMAND)
def test_more_capacity_never_means_less(
    capacity: float, more: float, tiers: list[TierShare], demand: list[float]
) -> None:
    """No tier's allocation, and no tier's ceiling, falls when the capacity grows."""
    asked = named(tiers, demand)
    for share_out in (allocate, ceilings):
        before, after = share_out(capacity, tiers, asked), share_out(capacity + more, tiers, asked)

        assert all(after[name] >= before[name] - slack(capacity + more) for name in before)


@given(CAPACITY, ANY_TIERS, DEMAND)
def test_a_ceiling_is_never_under_the_allocation(capacity: float, tiers: list[TierShare], demand: list[float]) -> None:
    """Nor over the capacity, nor what is no number."""
    asked = named(tiers, demand)
    allocated, ceiling = allocate(capacity, tiers, asked), ceilings(capacity, tiers, asked)

    for name, rate in ceiling.items():
        assert allocated[name] - slack(capacity) <= rate <= capacity + slack(capacity)


@given(CAPACITY, tier_sets(), DEMAND)
def test_an_idle_highest_tier_may_begin_with_all_but_what_is_guaranteed_to_others(
    capacity: float, tiers: list[TierShare], demand: list[float]
) -> None:
    """However the others flood, they cannot use more of what it will want than their guarantees."""
    highest = min(tiers, key=lambda tier: tier.priority)
    asked = named(tiers, demand) | {highest.name: 0.0}
    guaranteed = sum(min(asked[t.name], t.guaranteed_share * capacity) for t in tiers if t is not highest)

    assert ceilings(capacity, tiers, asked)[highest.name] >= capacity - guaranteed - slack(capacity)


@given(CAPACITY, tier_sets(), DEMAND)
def test_asking_for_more_takes_from_nobody_above(capacity: float, tiers: list[TierShare], demand: list[float]) -> None:
    """What a tier asks for beyond its guarantee changes nothing for the tiers of higher priority."""
    asked = named(tiers, demand)
    for tier in tiers:
        if asked[tier.name] >= tier.guaranteed_share * capacity:
            before, after = (allocate(capacity, tiers, asked | {tier.name: d}) for d in (asked[tier.name], INF))
            above = [other.name for other in tiers if other.priority < tier.priority]
            assert [after[name] for name in above] == pytest.approx(
                [before[name] for name in above], abs=slack(capacity)
            )
