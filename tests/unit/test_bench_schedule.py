"""When requests are due and to which tier they go."""

from itertools import pairwise

import pytest

from tierlane.bench.plan import Arrivals, Due, Mix, MixError, parse_mix, schedule

ONE = Mix(("only",), (1.0,))


@pytest.mark.parametrize(
    ("rate", "seconds", "expected"),
    [
        (2.0, 2.0, [0.0, 0.5, 1.0, 1.5]),
        (10.0, 0.3, [0.0, 0.1, 0.2]),
        (1.0, 0.4, []),
        (0.5, 4.0, [0.0, 2.0]),
    ],
)
def test_constant_arrivals_are_equally_spaced_from_zero(rate: float, seconds: float, expected: list[float]) -> None:
    """A metronome begins at 0 and gives rate x seconds requests."""
    times = [due.at_s for due in schedule(Arrivals.CONSTANT, rate, seconds, ONE, 1)]

    assert times == pytest.approx(expected)


def test_constant_arrivals_do_not_drift() -> None:
    """The 120,000th request is due where arithmetic says, not where as many roundings lead."""
    *_, last = schedule(Arrivals.CONSTANT, 300.0, 400.0, ONE, 1)

    assert last.at_s == 119_999 / 300.0


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    """100,000 gaps: their mean is 1/rate, and so is their deviation."""
    times = [due.at_s for due in schedule(Arrivals.POISSON, 1000.0, 100.0, ONE, 7)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5

    assert mean == pytest.approx(0.001, rel=0.02)
    assert deviation == pytest.approx(0.001, rel=0.02)
    assert all(0 <= time < 100 for time in times)


@pytest.mark.parametrize("arrivals", list(Arrivals))
def test_a_seed_fixes_the_schedule(arrivals: Arrivals) -> None:
    """The same seed gives the same requests, another seed others."""
    mix = Mix(("a", "b"), (0.5, 0.5))

    def made(seed: int) -> list[Due]:
        return list(schedule(arrivals, 500.0, 2.0, mix, seed))

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_the_mix_does_not_move_the_times() -> None:
    """Two runs that differ in the mix alone meet the same bursts."""
    one = [due.at_s for due in schedule(Arrivals.POISSON, 100.0, 2.0, ONE, 5)]
    two = [due.at_s for due in schedule(Arrivals.POISSON, 100.0, 2.0, Mix(("a", "b"), (0.9, 0.1)), 5)]

    assert one == two


def test_tiers_get_their_shares() -> None:
    """Of 100,000 requests each tier gets its share, within a per cent of all."""
    mix = parse_mix("enterprise=0.3,paid=0.6,free=0.1")
    tiers = [due.tier for due in schedule(Arrivals.CONSTANT, 1000.0, 100.0, mix, 3)]

    assert [tiers.count(tier) / 100_000 for tier in range(3)] == pytest.approx([0.3, 0.6, 0.1], abs=0.01)


@pytest.mark.parametrize(
    ("text", "tiers", "shares"),
    [
        ("enterprise=0.3,paid=0.6,free=0.1", ("enterprise", "paid", "free"), (0.3, 0.6, 0.1)),
        ("free=1", ("free",), (1.0,)),
        (" paid = 3 , free = 1 ", ("paid", "free"), (0.75, 0.25)),
        ("paid=1,free=0", ("paid",), (1.0,)),
    ],
)
def test_mixes_that_can_be_read(text: str, tiers: tuple[str, ...], shares: tuple[float, ...]) -> None:
    """Weights are scaled to sum to 1, and a tier of weight 0 is left out."""
    mix = parse_mix(text)

    assert mix.tiers == tiers
    assert mix.shares == pytest.approx(shares)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "TIER=WEIGHT, got ''"),
        ("paid", "TIER=WEIGHT, got 'paid'"),
        ("=1", "TIER=WEIGHT, got '=1'"),
        ("paid=1,paid=2", "'paid' is there twice"),
        ("paid=x", "weight of 'paid' must be a number of 0 or more, got 'x'"),
        ("paid=-1", "weight of 'paid' must be a number of 0 or more, got '-1'"),
        ("paid=inf", "got 'inf'"),
        ("paid=nan", "got 'nan'"),
        ("paid=0", "at least one tier"),
    ],
)
def test_mixes_that_cannot_be_read_are_told_why(text: str, fault: str) -> None:
    """The error names the part at fault."""
    with pytest.raises(MixError) as caught:
        parse_mix(text)

    assert fault in str(caught.value)
