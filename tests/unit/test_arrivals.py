"""The arrival rate that decides whether waiting for one more request pays."""

import pytest

from scheduler.batching.timing import ArrivalRate


@pytest.mark.parametrize(
    ("events", "asked_at", "rate"),
    [
        ([], 1.0, 0.0),
        ([(5, 0.0)], 0.0, 0.0),  # one look says nothing about a rate
        ([(0, 0.0), (100, 1.0)], 1.0, 93.75),  # four half-lives of 100/s
        ([(0, 0.0), (100, 1.0)], 1.25, 46.875),  # a quarter second of silence halves it
        ([(0, 0.0), (3, 0.0), (100, 1.0)], 1.0, 96.5625),  # two looks in one instant are one
    ],
)
def test_arrival_rate(events: list[tuple[int, float]], asked_at: float, rate: float) -> None:
    """Old news fades with a half-life of a quarter second, and silence is news."""
    arrivals = ArrivalRate(half_life_s=0.25)
    for count, at in events:
        arrivals.record(count, at)

    assert arrivals.per_second(asked_at) == pytest.approx(rate)
