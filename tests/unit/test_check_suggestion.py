"""From measured batch times to settings of a model: literal times, literal settings."""

import pytest

from tierlane.check.model_report import Timed, suggest


@pytest.mark.parametrize(
    ("timed", "size", "wait_ms", "rps"),
    [
        # A GPU whose time does not depend on the size: the largest that was tried, and the longest wait.
        ([(1, 50.0), (8, 50.0), (64, 50.0)], 64, 40, 1280.0),
        # Nothing gained by batches: one by one, and no wait.
        ([(1, 10.0), (2, 20.0), (4, 40.0), (8, 80.0)], 1, 0, 100.0),
        # 8 ms + 1 ms an item: 64 gives 889/s, 32 gives 800/s, which is exactly nine tenths of it.
        ([(1, 9.0), (8, 16.0), (16, 24.0), (32, 40.0), (64, 72.0)], 32, 8, 800.0),
        # A knee: beyond 16 it becomes slower.
        ([(1, 5.0), (16, 8.0), (32, 40.0)], 16, 0, 2000.0),
        # Larger ones run for more than a second: no time for another try.
        ([(1, 400.0), (2, 500.0), (4, 1100.0)], 2, 40, 4.0),
        # All of them do: the smallest.
        ([(4, 3000.0), (2, 2000.0)], 2, 40, 1.0),
        # A single size is a suggestion, too.
        ([(8, 20.0)], 8, 20, 400.0),
    ],
)
def test_the_smallest_batch_that_is_nearly_as_good_as_any(
    timed: list[tuple[int, float]], size: int, wait_ms: int, rps: float
) -> None:
    """The size with 90 % of the best throughput, a wait of at most what a batch costs by itself, and its rate."""
    found = suggest([Timed(*one) for one in timed])

    assert found is not None
    assert (found.max_batch_size, found.max_wait_ms, found.rps_per_gpu) == (size, wait_ms, rps)


def test_the_fit_is_told() -> None:
    """12 ms + 0.5 ms an item."""
    found = suggest([Timed(size, 12 + 0.5 * size) for size in (1, 2, 4, 8, 16)])

    assert found is not None
    assert (found.base_ms, found.item_ms) == (pytest.approx(12, abs=0.001), pytest.approx(0.5, abs=0.0001))


def test_without_times_there_is_nothing_to_suggest() -> None:
    """A model that ran no batch."""
    assert suggest([]) is None


def test_no_time_at_all_divides_by_nothing() -> None:
    """A function that takes less than the clock can tell."""
    found = suggest([Timed(1, 0.0)])

    assert found is not None
    assert found.rps_per_gpu == 1e6
