"""The arithmetic of the overshoot tests: the bound of a bucket over any interval, with rates that change."""

from math import inf

import pytest

from overshoot import InForce, allowance, always, most_missing


@pytest.mark.parametrize(
    ("begin_ms", "end_ms", "tokens"),
    [(0, 1000, 100.0), (0, 0, 0.0), (500, 2500, 50.0 + 100.0 + 10.0), (1900, 2100, 10.0 + 2.0), (3000, 4000, 20.0)],
)
def test_the_highest_rate_in_force_counts(begin_ms: float, end_ms: float, tokens: float) -> None:
    """100/s until 2000 ms, and 20/s from 1000 ms on: the old rate counts until no gateway may use it."""
    assert allowance([InForce(0, 2000, 100.0), InForce(1000, inf, 20.0)], begin_ms, end_ms) == pytest.approx(tokens)


@pytest.mark.parametrize(
    ("admitted_ms", "missing"),
    [
        ([0] * 20, 0.0),
        ([0] * 21, 1.0),
        ([0] * 20 + [10], 0.0),
        ([0] * 20 + [9], 0.1),
        ([0] * 20 + [5000] * 21, 1.0),  # Below the rate over the whole run, but the bucket holds only 20.
    ],
)
def test_one_request_too_many_is_found(admitted_ms: list[int], missing: float) -> None:
    """A bucket of 20 tokens at 100/s."""
    assert most_missing(admitted_ms, 20.0, always(100.0)) == pytest.approx(missing)
