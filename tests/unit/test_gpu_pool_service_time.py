"""Service time: percentiles, fit, rate, cap and change detection over literal numbers."""

import random

import pytest

from gpu_pool.worker.service_time import SAMPLES_TRUSTED, ServiceTime, cap_ms


def measured(*batches: tuple[int, float], times: int = SAMPLES_TRUSTED) -> ServiceTime:
    service = ServiceTime()
    for size, ms in batches:
        for _ in range(times):
            service.record(size, ms)
    return service


@pytest.mark.parametrize(
    ("count", "p95", "p99"),
    [(19, None, None), (20, 19.0, 20.0), (100, 95.0, 99.0), (128, 122.0, 127.0), (228, 222.0, 227.0)],
)
def test_percentiles_use_nearest_rank_over_the_last_128_samples(
    count: int, p95: float | None, p99: float | None
) -> None:
    """Samples of 1, 2, 3, ... ms; fewer than 20 give no percentile."""
    service = ServiceTime()
    for ms in range(1, count + 1):
        service.record(8, float(ms))

    assert (service.p95(8), service.p99(8)) == (p95, p99)


def test_sizes_within_a_factor_of_two_share_a_class() -> None:
    """Batches of 5 give percentiles for 4 to 7 only; `forget` drops one class."""
    service = measured((5, 50.0), (1, 20.0))
    assert [service.p99(size) for size in (1, 3, 4, 7, 8)] == [20.0, None, 50.0, 50.0, None]
    service.forget(7)
    assert (service.p99(5), service.p99(1)) == (None, 20.0)


@pytest.mark.parametrize(
    ("batches", "size", "predicted"),
    [
        ([], 32, 0.0),
        ([(1, 50.0)], 32, 50.0),  # One size gives no slope.
        ([(1, 11.0), (32, 42.0)], 16, 26.0),
        ([(1, 50.0), (32, 40.0)], 64, 45.0),  # No negative slope.
        ([(1, 1.0), (32, 64.0)], 16, 31.515),  # No negative base.
    ],
)
def test_fit(batches: list[tuple[int, float]], size: int, predicted: float) -> None:
    """The predicted time is a line over the measured sizes, with slope and base at or above zero."""
    assert measured(*batches).predicted_ms(size) == pytest.approx(predicted, abs=0.001)


@pytest.mark.parametrize(
    ("batches", "rate"),
    [([], 0.0), ([(1, 50.0)], 0.0), ([(15, 50.0)], 0.0), ([(16, 50.0)], 640.0), ([(1, 11.0), (32, 42.0)], 32_000 / 42)],
)
def test_rate_of_full_batches_needs_half_full_samples(batches: list[tuple[int, float]], rate: float) -> None:
    """The rate at 32 items a batch is 0 until batches of at least 16 were measured; 10,000 small ones do not change it."""
    service = measured(*batches)
    assert service.rate_at(32) == pytest.approx(rate)
    if rate > 640:
        for _ in range(10_000):
            service.record(1, 11.0)
        assert service.rate_at(32) == pytest.approx(rate)


@pytest.mark.parametrize(("times", "needed", "reported"), [(0, 0.0, 0.0), (19, 0.0, 50.0), (20, 50.0, 50.0)])
def test_needed_time_is_the_p95_once_it_is_known(times: int, needed: float, reported: float) -> None:
    """Too few samples reject no request; the heartbeat reports the fit meanwhile."""
    service = measured((8, 50.0), times=times)

    assert (service.needed_ms(8), service.typical_p95_ms(8)) == (needed, reported)


def test_forget_over_drops_larger_batches() -> None:
    """After out-of-memory, full batches run in several parts: the old rate is dropped, the first new sample sets it."""
    service = measured((8, 50.0), (32, 50.0))
    service.forget_over(32)
    assert service.rate_at(32) == 640.0

    service.forget_over(31)
    assert (service.rate_at(32), service.p95(8)) == (0.0, 50.0)
    service.record(32, 200.0)
    assert service.rate_at(32) == pytest.approx(160.0, rel=0.1)


@pytest.mark.parametrize(
    ("p99", "timeout", "cap"),
    [(None, 3000, 3000), (50, 3000, 500), (200, 3000, 800), (750, 3000, 3000), (5000, 3000, 3000), (50, 300, 300)],
)
def test_cap(p99: float | None, timeout: float, cap: float) -> None:
    """Four times the p99, at least 500 ms, at most the timeout."""
    assert cap_ms(p99, timeout) == cap


@pytest.mark.parametrize(("before", "after", "batches"), [(50.0, 200.0, 10), (500.0, 2000.0, 3), (200.0, 50.0, 3)])
def test_step_change_replaces_the_mean(before: float, after: float, batches: int) -> None:
    """A model that became slower (for two seconds of running) or faster is believed after so many batches, not before."""
    service = measured((32, before))
    for _ in range(batches - 1):
        service.record(32, after)
    assert service.p99(32) is not None
    service.record(32, after)

    assert (service.predicted_ms(32), service.p99(32)) == (pytest.approx(after), None)


def test_random_variation_is_no_step() -> None:
    """With times from 25 to 75 ms the estimate stays within a third of 50 ms over 20,000 batches."""
    service, generator = ServiceTime(), random.Random(1)
    predictions: list[float] = []
    for _ in range(20_000):
        service.record(32, 50.0 * generator.uniform(0.5, 1.5))
        predictions.append(service.predicted_ms(32))

    assert 50.0 / 1.33 < min(predictions[50:]) <= max(predictions[50:]) < 50.0 * 1.33


@pytest.mark.parametrize(
    ("usual", "slow", "most"),
    [((16, 45.0), [90.0] * 11, 54.0), ((32, 50.0), [500.0, 500.0, 50.0, 500.0], 120.0)],
    ids=["busy machine", "single outliers"],
)
def test_short_slowdowns_are_no_step(usual: tuple[int, float], slow: list[float], most: float) -> None:
    """A second of slow short batches, or single slow ones, moves the estimate only a little."""
    service = measured(usual, times=100 if usual[0] == 16 else 20)
    for ms in slow:
        service.record(usual[0], ms)

    assert service.predicted_ms(usual[0]) < most


@pytest.mark.parametrize(("small_ms", "full_ms"), [(12.0, 200.0), (300.0, 50.0)])
def test_contradicted_sizes_are_forgotten(small_ms: float, full_ms: float) -> None:
    """Full batches that no longer run are forgotten once small ones show that their time cannot be true any more."""
    service = measured((32, full_ms), (4, small_ms), times=40)

    assert (service.seen_batch, service.predicted_ms(32)) == (4, pytest.approx(small_ms))
