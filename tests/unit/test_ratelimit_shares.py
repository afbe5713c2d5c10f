"""Shares of the capacity: literal tables, and properties for every capacity, set of tiers and demand."""

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit.shares import TierShare, allocate, ceilings, factor, part_of_capacity, remembered, share_in_part

TIERS = (TierShare("enterprise", 1, 0.05), TierShare("paid", 2, 0.25), TierShare("free", 3, 0.10))
INF = math.inf


def by_tier(enterprise: float, paid: float, free: float) -> dict[str, float]:
    return {"enterprise": enterprise, "paid": paid, "free": free}


@pytest.mark.parametrize(
    ("capacity", "demand", "allocated"),
    [
        # no demand
        (100.0, {}, by_tier(0.0, 0.0, 0.0)),
        # enough for all
        (100.0, by_tier(10.0, 20.0, 30.0), by_tier(10.0, 20.0, 30.0)),
        # an unused share is lent, also to the lowest tier
        (100.0, by_tier(0.0, 0.0, 500.0), by_tier(0.0, 0.0, 100.0)),
        (100.0, by_tier(500.0, 0.0, 0.0), by_tier(100.0, 0.0, 0.0)),
        # too little: free is reduced first, down to its guarantee, then paid, then enterprise
        (100.0, by_tier(60.0, 25.0, 80.0), by_tier(60.0, 25.0, 15.0)),
        (100.0, by_tier(60.0, 40.0, 80.0), by_tier(60.0, 30.0, 10.0)),
        (100.0, by_tier(500.0, 500.0, 500.0), by_tier(65.0, 25.0, 10.0)),
        # half of the capacity is lost: the same order
        (50.0, by_tier(20.0, 25.0, 80.0), by_tier(20.0, 25.0, 5.0)),
        # a demand below the guarantee leaves the rest to the others
        (100.0, by_tier(500.0, 10.0, 2.0), by_tier(88.0, 10.0, 2.0)),
        # infinite demand
        (100.0, by_tier(INF, INF, INF), by_tier(65.0, 25.0, 10.0)),
        (100.0, by_tier(20.0, 0.0, INF), by_tier(20.0, 0.0, 80.0)),
        # undefined and negative demand counts as 0
        (100.0, by_tier(math.nan, -5.0, 500.0), by_tier(0.0, 0.0, 100.0)),
        (0.0, by_tier(5.0, INF, 0.0), by_tier(0.0, 0.0, 0.0)),
        (-1.0, by_tier(5.0, 5.0, 5.0), by_tier(0.0, 0.0, 0.0)),
    ],
)
def test_allocation(capacity: float, demand: dict[str, float], allocated: dict[str, float]) -> None:
    """Guaranteed shares first, then by priority; unused shares are lent. The order of the list does not matter."""
    for tiers in permutations(TIERS):
        assert allocate(capacity, tiers, demand) == pytest.approx(allocated)


@pytest.mark.parametrize(
    ("capacity", "demand", "ceiling"),
    [
        # no demand: each tier may use all
        (100.0, {}, by_tier(100.0, 100.0, 100.0)),
        # free floods: idle higher tiers may use all but its guarantee, and free may use what they leave
        (100.0, by_tier(0.0, 0.0, 1000.0), by_tier(90.0, 90.0, 100.0)),
        # enterprise floods: each of the others may use its guarantee
        (100.0, by_tier(1000.0, 0.0, 0.0), by_tier(100.0, 25.0, 10.0)),
        (100.0, by_tier(10.0, 20.0, 30.0), by_tier(70.0, 80.0, 70.0)),
        (100.0, by_tier(500.0, 500.0, 500.0), by_tier(65.0, 25.0, 10.0)),
        (0.0, by_tier(5.0, 5.0, 5.0), by_tier(0.0, 0.0, 0.0)),
    ],
)
def test_ceilings(capacity: float, demand: dict[str, float], ceiling: dict[str, float]) -> None:
    """The allocation of each tier if it demanded everything: an idle tier is not blocked by tiers that use its share."""
    assert ceilings(capacity, TIERS, demand) == pytest.approx(ceiling)


@pytest.mark.parametrize(
    ("shares", "allocated"),
    [
        ((0.5, 0.3, 0.2), (50.0, 30.0, 20.0)),
        ((0.0, 0.0, 1.0), (0.0, 0.0, 100.0)),
        ((0.0, 0.0, 0.0), (100.0, 0.0, 0.0)),
        # more than 100 %: the guarantee of the higher tier holds
        ((0.8, 0.5, 0.5), (80.0, 20.0, 0.0)),
        ((1.0, 1.0, 1.0), (100.0, 0.0, 0.0)),
    ],
)
def test_shares_of_the_whole(shares: tuple[float, ...], allocated: tuple[float, ...]) -> None:
    """Guarantees of 100 % and more."""
    tiers = [TierShare(tier.name, tier.priority, share) for tier, share in zip(TIERS, shares, strict=True)]

    assert allocate(100.0, tiers, by_tier(INF, INF, INF)) == pytest.approx(by_tier(*allocated))


def test_a_satisfied_demand_is_exact() -> None:
    """0.1 + 0.2 is more than 0.3 in floating point, which must not reduce a limit."""
    demand = by_tier(0.1, 0.2, 0.3)

    assert allocate(7.0, TIERS, demand) == demand


@pytest.mark.parametrize(
    ("allocated", "demand", "kept"),
    [(50.0, 0.0, 1.0), (50.0, 40.0, 1.0), (25.0, 100.0, 0.25), (0.0, 10.0, 0.0), (50.0, INF, 0.0), (0.0, 0.0, 1.0)],
)
def test_factor(allocated: float, demand: float, kept: float) -> None:
    """A tier whose demand is satisfied has full limits."""
    assert factor(allocated, demand) == kept


ALL = by_tier(40.0, 40.0, 100.0)
"""Needs of more than 100, of which free gets 20."""


@pytest.mark.parametrize(
    ("needs", "own", "least", "part", "shares", "rates"),
    [
        # everything is served here: as without parts
        (ALL, ALL, 0.0, 1.0, by_tier(0.05, 0.25, 0.1), by_tier(65.0, 50.0, 20.0)),
        # half of each tier
        (ALL, by_tier(20.0, 20.0, 50.0), 0.0, 0.5, by_tier(0.05, 0.25, 0.1), by_tier(32.5, 25.0, 10.0)),
        # all of free: a fifth of the capacity, whatever the size of its need, of which half is guaranteed
        (ALL, by_tier(0.0, 0.0, 100.0), 0.0, 0.2, by_tier(0.05, 0.25, 0.5), by_tier(10.0, 10.0, 20.0)),
        # half of the workers are here
        (ALL, by_tier(0.0, 0.0, 100.0), 0.5, 0.5, by_tier(0.05, 0.25, 0.2), by_tier(40.0, 40.0, 50.0)),
        # nothing is needed
        ({}, {}, 0.5, 1.0, by_tier(0.05, 0.25, 0.1), by_tier(100.0, 100.0, 100.0)),
    ],
)
def test_a_part_of_the_capacity(
    needs: dict[str, float],
    own: dict[str, float],
    least: float,
    part: float,
    shares: dict[str, float],
    rates: dict[str, float],
) -> None:
    """What the tiers get of the capacity is divided by their needs; each keeps its guarantee."""
    found = part_of_capacity(100.0, TIERS, needs, own, own, least=least)

    assert found.part == pytest.approx(part)
    assert {tier.name: tier.guaranteed_share for tier in found.shares} == pytest.approx(shares)
    assert found.rates == pytest.approx(rates)


def test_a_tier_may_use_here_what_it_does_not_use_elsewhere() -> None:
    """Workers follow the higher tiers: only what the tier gets elsewhere is not available here; at least the part that is here."""
    found = part_of_capacity(100.0, TIERS, ALL, by_tier(10.0, 0.0, 50.0), {}, least=0.25)

    assert found.elsewhere == pytest.approx(by_tier(30.0, 40.0, 10.0))
    assert found.ceiling("enterprise", 65.0) == pytest.approx(35.0)
    assert found.ceiling("paid", 50.0) == pytest.approx(25.0)
    assert found.ceiling("free", 20.0) == 20.0


@pytest.mark.parametrize(
    ("of_tier", "of_capacity", "share"),
    [(0.5, 0.5, 0.1), (1.0, 0.5, 0.2), (0.1, 0.5, 0.02), (0.0, 0.5, 0.0), (1.0, 0.05, 1.0), (1.0, 0.0, 0.1)],
)
def test_a_share_in_a_part_of_the_capacity(of_tier: float, of_capacity: float, share: float) -> None:
    """A share of 0.1, in proportion to the part of the tier's demand there; at most all of the part."""
    assert share_in_part(0.1, of_tier, of_capacity) == pytest.approx(share)


@pytest.mark.parametrize(
    ("before", "demand", "kept", "elapsed_s", "expected"),
    [
        (400.0, 80.0, 1.0, 1.0, 80.0),  # Nothing is reduced, so the demand is known.
        (400.0, 80.0, 0.1, 0.0, 400.0),
        (400.0, 80.0, 0.1, 60.0, 147.152),
        (400.0, 80.0, 0.1, 3600.0, 80.0),
        (400.0, 500.0, 0.1, 1.0, 500.0),
    ],
)
def test_remembered_demand(before: float, demand: float, kept: float, elapsed_s: float, expected: float) -> None:
    """Under a reduced limit clients may wait, so the demand before it is used, which decays to the present one."""
    assert remembered(before, demand, kept, elapsed_s) == pytest.approx(expected, abs=0.001)


CAPACITY = st.floats(0, 1e6)
DEMAND = st.lists(st.one_of(st.floats(0, 1e6), st.just(INF)), min_size=6, max_size=6)


@st.composite
def tier_sets(draw: st.DrawFn, most: float = 1.0) -> list[TierShare]:
    """Up to six tiers, with equal priorities too, whose shares add up to at most `most`."""
    parts = draw(st.lists(st.integers(0, 100), min_size=1, max_size=6))
    scale = draw(st.floats(0, most)) / max(1, sum(parts))
    priorities = draw(st.lists(st.integers(1, 4), min_size=len(parts), max_size=len(parts)))
    return [TierShare(f"t{i}", priorities[i], min(1.0, parts[i] * scale)) for i in range(len(parts))]


ANY_TIERS = st.one_of(tier_sets(), tier_sets(most=3.0))


def named(tiers: list[TierShare], demand: list[float]) -> dict[str, float]:
    return {tier.name: rate for tier, rate in zip(tiers, demand, strict=False)}


def slack(capacity: float) -> float:
    """The tolerance for floating point."""
    return 1e-9 * max(1.0, capacity)


@given(CAPACITY, ANY_TIERS, DEMAND)
def test_allocations_are_within_the_capacity_and_the_demand(
    capacity: float, tiers: list[TierShare], demand: list[float]
) -> None:
    """Each allocation is at most the demand, and their sum is the capacity or the whole demand."""
    wanted = named(tiers, demand)
    allocated = allocate(capacity, tiers, wanted)

    assert all(0 <= allocated[name] <= wanted[name] for name in wanted)
    assert sum(allocated.values()) <= capacity + slack(capacity)
    assert sum(allocated.values()) >= min(capacity, sum(wanted.values())) - slack(capacity)


@given(CAPACITY, ANY_TIERS, DEMAND)
def test_a_higher_tier_never_loses_before_a_lower_one(
    capacity: float, tiers: list[TierShare], demand: list[float]
) -> None:
    """If a tier gets less than its demand, no tier of lower priority gets more than its guaranteed share."""
    wanted = named(tiers, demand)
    allocated = allocate(capacity, tiers, wanted)

    for higher in tiers:
        if allocated[higher.name] < wanted[higher.name] - slack(capacity):
            for lower in tiers:
                if lower.priority > higher.priority:
                    assert allocated[lower.name] <= lower.guaranteed_share * capacity + slack(capacity)


@given(CAPACITY, tier_sets(), DEMAND)
def test_guaranteed_shares_hold(capacity: float, tiers: list[TierShare], demand: list[float]) -> None:
    """A tier gets its demand, or at least its share of the capacity."""
    wanted = named(tiers, demand)
    allocated = allocate(capacity, tiers, wanted)

    for tier in tiers:
        assert allocated[tier.name] >= min(wanted[tier.name], tier.guaranteed_share * capacity) - slack(capacity)


@given(CAPACITY, CAPACITY, ANY_TIERS, DEMAND)
def test_more_capacity_reduces_no_tier(
    capacity: float, more: float, tiers: list[TierShare], demand: list[float]
) -> None:
    """Neither its allocation nor its ceiling."""
    wanted = named(tiers, demand)
    for share_out in (allocate, ceilings):
        before, after = share_out(capacity, tiers, wanted), share_out(capacity + more, tiers, wanted)

        assert all(after[name] >= before[name] - slack(capacity + more) for name in before)


@given(CAPACITY, ANY_TIERS, DEMAND)
def test_a_ceiling_is_never_under_the_allocation(capacity: float, tiers: list[TierShare], demand: list[float]) -> None:
    """Nor above the capacity, nor undefined."""
    wanted = named(tiers, demand)
    allocated, ceiling = allocate(capacity, tiers, wanted), ceilings(capacity, tiers, wanted)

    for name, rate in ceiling.items():
        assert allocated[name] - slack(capacity) <= rate <= capacity + slack(capacity)


@given(CAPACITY, tier_sets(), DEMAND)
def test_an_idle_highest_tier_may_use_all_but_the_guarantees_of_others(
    capacity: float, tiers: list[TierShare], demand: list[float]
) -> None:
    """For every demand of the others."""
    highest = min(tiers, key=lambda tier: tier.priority)
    wanted = named(tiers, demand) | {highest.name: 0.0}
    guaranteed = sum(min(wanted[t.name], t.guaranteed_share * capacity) for t in tiers if t is not highest)

    assert ceilings(capacity, tiers, wanted)[highest.name] >= capacity - guaranteed - slack(capacity)


@given(CAPACITY, tier_sets(), DEMAND)
def test_more_demand_does_not_reduce_higher_tiers(capacity: float, tiers: list[TierShare], demand: list[float]) -> None:
    """Demand beyond the guarantee does not change the allocation of tiers of higher priority."""
    wanted = named(tiers, demand)
    for tier in tiers:
        if wanted[tier.name] >= tier.guaranteed_share * capacity:
            before, after = (allocate(capacity, tiers, wanted | {tier.name: d}) for d in (wanted[tier.name], INF))
            above = [other.name for other in tiers if other.priority < tier.priority]
            assert [after[name] for name in above] == pytest.approx(
                [before[name] for name in above], abs=slack(capacity)
            )
