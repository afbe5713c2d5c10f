"""Capacity, shares and slew, by literal tables and properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit.capacity import capacity_rps
from ratelimit.shares import TierShare, allocate, factor
from ratelimit.slew import relax

TIERS = (TierShare("enterprise", 1, 0.05), TierShare("paid", 2, 0.25), TierShare("free", 3, 0.10))


@pytest.mark.parametrize(
    ("rates", "prior", "target", "capacity"),
    [
        ([], 100.0, 0.85, 0.0),  # no healthy GPU
        ([0.0, 0.0], 100.0, 0.85, 170.0),  # nothing measured: the prior
        ([200.0, 0.0], 100.0, 1.0, 400.0),  # a new GPU is taken to be like its measured neighbours
        ([200.0, 100.0], 999.0, 0.5, 150.0),
    ],
)
def test_capacity(rates: list[float], prior: float, target: float, capacity: float) -> None:
    """Target utilization x the sum of the rates of the healthy GPUs."""
    assert capacity_rps(rates, prior, target) == pytest.approx(capacity)


@pytest.mark.parametrize(
    ("capacity", "demand", "allowed"),
    [
        # nothing asked for: everything is lent to whoever comes
        (100.0, {}, {"enterprise": 100.0, "paid": 100.0, "free": 100.0}),
        # enough for all: what is left is lent
        (100.0, {"enterprise": 10.0, "paid": 20.0, "free": 30.0}, {"enterprise": 50.0, "paid": 60.0, "free": 70.0}),
        # too little: free tightens first, down to its guarantee
        (100.0, {"enterprise": 60.0, "paid": 25.0, "free": 80.0}, {"enterprise": 60.0, "paid": 25.0, "free": 15.0}),
        (100.0, {"enterprise": 500.0, "paid": 500.0, "free": 500.0}, {"enterprise": 65.0, "paid": 25.0, "free": 10.0}),
        # a guarantee that is not asked for is not kept back
        (100.0, {"enterprise": 500.0}, {"enterprise": 100.0, "paid": 0.0, "free": 0.0}),
        (0.0, {"enterprise": 5.0}, {"enterprise": 0.0, "paid": 0.0, "free": 0.0}),
    ],
)
def test_allocation(capacity: float, demand: dict[str, float], allowed: dict[str, float]) -> None:
    """Guaranteed shares first, then by priority; unused share is lent."""
    assert allocate(capacity, TIERS, demand) == pytest.approx(allowed)


RATES = st.floats(0, 1e5)
DEMAND = st.fixed_dictionaries({"enterprise": RATES, "paid": RATES, "free": RATES})


@given(RATES, DEMAND)
def test_what_is_used_never_exceeds_capacity(capacity: float, demand: dict[str, float]) -> None:
    """Each tier uses at most what it asks for of what it may: the sum stays within the capacity."""
    allowed = allocate(capacity, TIERS, demand)

    assert sum(min(allowed[t], demand[t]) for t in allowed) <= capacity * (1 + 1e-9)


@given(RATES, DEMAND)
def test_guarantees_hold(capacity: float, demand: dict[str, float]) -> None:
    """A tier gets what it asks for, or at least its guaranteed share."""
    allowed = allocate(capacity, TIERS, demand)

    for tier in TIERS:
        assert allowed[tier.name] >= min(demand[tier.name], tier.guaranteed_share * capacity) - 1e-6


@given(RATES, DEMAND)
def test_a_lower_tier_loses_first(capacity: float, demand: dict[str, float]) -> None:
    """While a higher tier is not served in full, a lower one has no more than its guarantee."""
    allowed = allocate(capacity, TIERS, demand)

    if allowed["enterprise"] < demand["enterprise"] - 1e-6:
        assert allowed["free"] <= TIERS[2].guaranteed_share * capacity + 1e-6


@given(RATES, st.floats(0, 1e4), DEMAND)
def test_more_capacity_never_means_less(capacity: float, more: float, demand: dict[str, float]) -> None:
    """What each tier can use is monotone in the capacity."""
    before, after = allocate(capacity, TIERS, demand), allocate(capacity + more, TIERS, demand)

    for tier in before:
        assert min(after[tier], demand[tier]) >= min(before[tier], demand[tier]) - 1e-6


@pytest.mark.parametrize(
    ("allocated", "demand", "kept"), [(50.0, 0.0, 1.0), (50.0, 40.0, 1.0), (25.0, 100.0, 0.25), (0.0, 10.0, 0.0)]
)
def test_factor(allocated: float, demand: float, kept: float) -> None:
    """A tier that gets all it asks for keeps its keys' full limits."""
    assert factor(allocated, demand) == kept


@pytest.mark.parametrize(
    ("previous", "target", "elapsed_s", "now"),
    [
        (1.0, 0.2, 0.01, 0.2),  # tighten at once
        (0.2, 1.0, 1.0, 0.45),  # relax slowly
        (0.9, 1.0, 1.0, 1.0),
        (0.2, 1.0, -5.0, 0.2),  # a clock that went back relaxes nothing
    ],
)
def test_slew(previous: float, target: float, elapsed_s: float, now: float) -> None:
    """Limits fall in one step and come back over seconds."""
    assert relax(previous, target, elapsed_s) == pytest.approx(now)
