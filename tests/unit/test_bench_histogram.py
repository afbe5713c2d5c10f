"""The histogram of times against exact arithmetic."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlane.bench.statistics import HIGHEST_S, LOWEST_S, MAX_RELATIVE_ERROR, Histogram

times = st.lists(st.floats(LOWEST_S, HIGHEST_S), min_size=1, max_size=200)


def filled(samples: list[float]) -> Histogram:
    histogram = Histogram()
    for sample in samples:
        histogram.record(sample)
    return histogram


def exact(samples: list[float], share: float) -> float:
    return sorted(samples)[max(1, math.ceil(share * len(samples))) - 1]


@given(times, st.floats(0, 1))
def test_quantiles_are_within_the_stated_error(samples: list[float], share: float) -> None:
    """Every quantile is within half a per cent of the exact one, by nearest rank."""
    found = filled(samples).quantile(share)

    assert found == pytest.approx(exact(samples, share), rel=MAX_RELATIVE_ERROR * 1.001)
    assert MAX_RELATIVE_ERROR < 0.01


def test_a_large_sample() -> None:
    """100,000 log-normal times: the usual percentiles agree with the sorted list."""
    random = Random(3)
    samples = [random.lognormvariate(-3, 0.7) for _ in range(100_000)]
    histogram = filled(samples)

    for share in (0.5, 0.95, 0.99, 0.999):
        assert histogram.quantile(share) == pytest.approx(exact(samples, share), rel=MAX_RELATIVE_ERROR * 1.001)


@given(times)
def test_mean_deviation_and_ends_are_exact(samples: list[float]) -> None:
    """Only quantiles are rounded."""
    histogram = filled(samples)
    mean = sum(samples) / len(samples)
    deviation = math.sqrt(sum((sample - mean) ** 2 for sample in samples) / len(samples))

    assert histogram.mean == pytest.approx(mean)
    assert histogram.deviation == pytest.approx(deviation, abs=1e-4 * max(samples))
    assert (histogram.least, histogram.largest, histogram.count) == (min(samples), max(samples), len(samples))
    assert histogram.quantile(1) == max(samples)


@given(times, times)
def test_merging_is_the_same_as_recording_all(first: list[float], second: list[float]) -> None:
    """The sum of two tiers has the percentiles of both together."""
    merged, whole = Histogram.merged([filled(first), filled(second)]), filled(first + second)

    assert merged.count == whole.count
    assert merged.mean == pytest.approx(whole.mean)
    assert [merged.quantile(share) for share in (0.5, 0.99, 1)] == [whole.quantile(share) for share in (0.5, 0.99, 1)]


@pytest.mark.parametrize("sample", [0.0, -0.001, 1e-9, 1e6])
def test_what_is_outside_the_range_counts_at_the_edge(sample: float) -> None:
    """No time is lost, however odd."""
    histogram = filled([sample, sample])

    assert histogram.count == 2
    assert histogram.quantile(0.5) is not None


def test_an_empty_histogram_has_no_figures() -> None:
    """No sample, no number: not a zero that looks fast."""
    histogram = Histogram()

    assert (histogram.quantile(0.5), histogram.mean, histogram.deviation) == (None, None, None)
