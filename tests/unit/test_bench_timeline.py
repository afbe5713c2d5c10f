"""A run over time: what came back in each second, taken from tallies that only ever grow."""

import pytest

from tierlane.bench.runner import Timeline
from tierlane.bench.statistics import MAX_RELATIVE_ERROR, Histogram, UnansweredCause, new_tallies


def test_each_step_holds_what_came_since_the_last() -> None:
    """Answers of the warm-up and of the window count alike; an empty step has no p99."""
    warmup, measured = new_tallies(["paid", "free"], {}), new_tallies(["paid", "free"], {})
    timeline = Timeline(warmup, measured)
    for _ in range(10):
        warmup[0].completed(0.010)
    warmup[1].failed(429, "rate_limit_exceeded", 0.001)
    timeline.step(1.0)
    measured[0].completed(0.500)
    measured[1].unanswered(UnansweredCause.TIMEOUT)
    timeline.step(2.5)
    timeline.step(3.5)

    assert [step.at_s for step in timeline.steps] == [1.0, 2.5, 3.5]
    assert [step.length_s for step in timeline.steps] == [1.0, 1.5, 1.0]
    assert [[tier.completed for tier in step.tiers] for step in timeline.steps] == [[10, 0], [1, 0], [0, 0]]
    assert [[tier.failed for tier in step.tiers] for step in timeline.steps] == [[0, 1], [0, 1], [0, 0]]
    assert [step.tiers[0].p99_s for step in timeline.steps] == [
        pytest.approx(0.010, rel=2 * MAX_RELATIVE_ERROR),
        pytest.approx(0.500, rel=2 * MAX_RELATIVE_ERROR),
        None,
    ]


def test_steps_of_a_histogram_hold_every_sample_below_their_end() -> None:
    """Fewer buckets, nothing lost, and no sample above the end of its bucket."""
    histogram = Histogram()
    times = [1e-7, 0.001, 0.0011, 0.05, 0.051, 2.0]
    for seconds in times:
        histogram.record(seconds)
    steps = histogram.steps(1.5)

    assert sum(count for _, count in steps) == len(times)
    for upper, _ in steps:
        assert sum(count for end, count in steps if end <= upper) == sum(seconds <= upper for seconds in times)
