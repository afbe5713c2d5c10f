"""What the stories of overshoot judge by: the bound of a bucket over any stretch, and rates that change meanwhile."""

from math import inf

import pytest

from overshoot import Entered, Hammered, InForce, allowance, always, judge, most_missing, never_over


@pytest.mark.parametrize(
    ("begin_ms", "end_ms", "given"),
    [(0, 1000, 100.0), (0, 0, 0.0), (500, 2500, 50.0 + 100.0 + 10.0), (1900, 2100, 10.0 + 2.0), (3000, 4000, 20.0)],
)
def test_the_highest_rate_in_force_counts(begin_ms: float, end_ms: float, given: float) -> None:
    """100/s until 2000, lowered to 20/s at 1000: the old one counts until the last gateway has let go of it."""
    assert allowance([InForce(0, 2000, 100.0), InForce(1000, inf, 20.0)], begin_ms, end_ms) == pytest.approx(given)


@pytest.mark.parametrize(
    ("moments", "missing"),
    [
        ([0] * 20, 0.0),
        ([0] * 21, 1.0),
        ([0] * 20 + [10], 0.0),
        ([0] * 20 + [9], 0.1),
        ([0] * 20 + [1000] * 20, 0.0),
        ([0] * 20 + [5000] * 21, 1.0),  # Within 100/s in the whole, and over it in one moment: the bucket holds 20.
    ],
)
def test_one_request_too_many_in_any_stretch_is_found(moments: list[int], missing: float) -> None:
    """A bucket of 20 at 100/s."""
    assert most_missing(moments, 20.0, always(100.0)) == pytest.approx(missing)


def judged(count: int, given_back: int = 0) -> None:
    at = {f"r{n}": 0 for n in range(count)}
    found = Entered(at, frozenset(list(at)[:given_back]))
    seen = Hammered()
    never_over(judge(seen, found, 20.0, always(100.0)), seen, found, 100.0)


def test_the_stories_can_fail() -> None:
    """Twenty at once are right, one more is not, unless one of them was paid back."""
    judged(20)
    judged(21, given_back=1)
    with pytest.raises(AssertionError):
        judged(21)
