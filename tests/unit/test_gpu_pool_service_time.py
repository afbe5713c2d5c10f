"""Service time: percentiles, fit, rate and cap as arithmetic over literal numbers."""

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
    ("count", "share_95", "share_99"),
    [
        (19, None, None),  # too few to say anything
        (20, 19.0, 20.0),
        (100, 95.0, 99.0),
        (128, 122.0, 127.0),
        (228, 222.0, 227.0),  # only the last 128 count: 101 to 228
    ],
)
def test_percentiles_by_nearest_rank(count: int, share_95: float | None, share_99: float | None) -> None:
    """The n-th of samples 1, 2, 3, ... ms, once there are 20, over the last 128."""
    service = ServiceTime()
    for ms in range(1, count + 1):
        service.record(8, float(ms))

    assert (share_95, share_99) == (service.p95(8), service.p99(8))


@pytest.mark.parametrize(("size", "known"), [(1, False), (3, False), (4, True), (7, True), (8, False), (64, False)])
def test_sizes_within_a_factor_of_two_share_their_percentiles(size: int, known: bool) -> None:
    """Batches of 5 speak for 4 to 7, and for no other size."""
    assert known == (measured((5, 50.0)).p99(size) is not None)


@pytest.mark.parametrize(
    ("batches", "size", "predicted"),
    [
        ([], 32, 0.0),
        ([(1, 50.0)], 32, 50.0),  # one size says nothing of the slope: taken as flat
        ([(1, 11.0), (32, 42.0)], 16, 26.0),  # 1 ms an item and 10 ms a batch
        ([(1, 50.0), (32, 40.0)], 64, 45.0),  # never less time for more items
        ([(1, 1.0), (32, 64.0)], 16, 31.515),  # a negative base would promise negative times: through the origin
    ],
)
def test_the_fit_is_a_line_with_neither_slope_nor_base_below_zero(
    batches: list[tuple[int, float]], size: int, predicted: float
) -> None:
    """Milliseconds = a * n + b over what was measured."""
    assert predicted == pytest.approx(measured(*batches).predicted_ms(size), abs=0.001)


@pytest.mark.parametrize(
    ("batches", "rate"),
    [
        ([], 0.0),
        ([(1, 50.0)], 0.0),  # single requests do not tell what a full batch takes
        ([(15, 50.0)], 0.0),
        ([(16, 50.0)], 640.0),
        ([(32, 50.0)], 640.0),
        ([(1, 11.0), (32, 42.0)], 32_000 / 42),
    ],
)
def test_the_rate_of_full_batches_is_zero_until_half_full_ones_were_seen(
    batches: list[tuple[int, float]], rate: float
) -> None:
    """Requests a second at 32 to the batch."""
    assert rate == pytest.approx(measured(*batches).rate_at(32))


def test_a_quiet_hour_does_not_unlearn_full_batches() -> None:
    """Ten thousand single requests leave the rate of full batches as it was measured."""
    service = measured((32, 42.0), (1, 11.0))
    for _ in range(10_000):
        service.record(1, 11.0)

    assert pytest.approx(32_000 / 42) == service.rate_at(32)


def test_a_slower_model_is_noticed() -> None:
    """Newer samples weigh more: after 10 s of batches of 100 ms the old 50 ms count little, after 20 s hardly anything."""
    service, told = measured((32, 50.0)), []
    for _ in range(200):
        service.record(32, 100.0)
        told.append(service.predicted_ms(32))

    assert (told[99], told[199]) == (pytest.approx(100.0, rel=0.1), pytest.approx(100.0, rel=0.02))


@pytest.mark.parametrize(("times", "needed", "told"), [(0, 0.0, 0.0), (19, 0.0, 50.0), (20, 50.0, 50.0)])
def test_what_a_run_needs_is_its_p95_once_that_is_known(times: int, needed: float, told: float) -> None:
    """Too few samples refuse nobody, so that they become more; heartbeats tell the fit meanwhile."""
    service = measured((8, 50.0), times=times)

    assert (service.needed_ms(8), service.typical_p95_ms(8)) == (needed, told)


def test_a_stopped_size_is_measured_afresh() -> None:
    """What stopped a batch is not believed until new samples are there, for that size only."""
    service = measured((8, 50.0), (1, 20.0))

    service.forget(8)

    assert (service.p99(8), service.p99(1)) == (None, 20.0)


@pytest.mark.parametrize(("largest", "rate"), [(32, 640.0), (31, 0.0), (8, 0.0)])
def test_what_runs_in_another_way_is_measured_afresh(largest: int, rate: float) -> None:
    """A device that holds fewer items runs full batches in several goes: the old rate must not be told any longer."""
    service = measured((8, 50.0), (32, 50.0))

    service.forget_over(largest)

    assert (service.rate_at(32), service.p95(8)) == (rate, 50.0)


def test_the_new_rate_of_full_batches_is_told_with_the_first_of_them() -> None:
    """What was measured of smaller batches stays, and does not make the large ones look faster than they are."""
    service = measured((8, 50.0), (32, 50.0))
    service.forget_over(8)

    service.record(32, 200.0)

    assert service.rate_at(32) == pytest.approx(160.0, rel=0.1)


@pytest.mark.parametrize(
    ("p99", "timeout", "cap"),
    [
        (None, 3000, 3000),  # not measured: the timeout alone
        (50, 3000, 500),  # the floor: a hiccup of the machine is no hang
        (200, 3000, 800),
        (750, 3000, 3000),
        (5000, 3000, 3000),
        (50, 300, 300),  # never over the timeout, whatever the floor
    ],
)
def test_the_cap_is_four_times_p99_within_floor_and_timeout(p99: float | None, timeout: float, cap: float) -> None:
    """min(timeout, 4 x p99), not under 500 ms."""
    assert cap == cap_ms(p99, timeout)


@pytest.mark.parametrize(("before", "after", "batches"), [(50.0, 200.0, 10), (500.0, 2000.0, 3), (200.0, 50.0, 3)])
def test_a_step_is_believed_after_three_batches(before: float, after: float, batches: int) -> None:
    """A model that became four times slower, for two seconds, or faster is not averaged with what it was; nor believed earlier."""
    service = measured((32, before))
    for _ in range(batches - 1):
        service.record(32, after)
    assert service.p99(32) is not None
    service.record(32, after)

    assert (service.predicted_ms(32), service.p99(32)) == (pytest.approx(after), None)


@pytest.mark.parametrize("seed", range(5))
def test_times_that_vary_by_chance_are_no_step(seed: int) -> None:
    """From half to one and a half of 50 ms: what is told stays within a third of it, over 20,000 batches."""
    service, chance = ServiceTime(), random.Random(seed)
    told: list[float] = []
    for _ in range(20_000):
        service.record(32, 50.0 * chance.uniform(0.5, 1.5))
        told.append(service.predicted_ms(32))

    assert 50.0 / 1.33 < min(told[50:]) <= max(told[50:]) < 50.0 * 1.33


@pytest.mark.parametrize("slow", [3, 11])
def test_short_batches_that_a_busy_machine_slowed_are_no_step(slow: int) -> None:
    """A quarter of a second, or a whole one, in which everything took twice as long: the estimate moves by less than a fifth."""
    service = measured((16, 45.0), times=100)
    for _ in range(slow):
        service.record(16, 90.0)

    assert service.predicted_ms(16) < 1.2 * 45.0


def test_one_slow_batch_is_no_step() -> None:
    """Nor are two; and where times always vary, nothing of the usual size is."""
    service = measured((32, 50.0))
    for ms in (500.0, 500.0, 50.0, 500.0):
        service.record(32, ms)
    varying = measured((8, 20.0), (8, 80.0), times=1)
    for _ in range(40):
        for ms in (20.0, 80.0, 80.0, 80.0):
            varying.record(8, ms)

    assert service.predicted_ms(32) < 120
    assert varying.predicted_ms(8) == pytest.approx(65.0, rel=0.2)


@pytest.mark.parametrize(
    ("small_ms", "full_ms"),
    [
        (12.0, 200.0),  # a batch of four in 12 ms: 32 hardly take more than 96
        (300.0, 50.0),  # nor less than what four take
    ],
)
def test_sizes_that_do_not_run_are_forgotten_once_they_cannot_be_true(small_ms: float, full_ms: float) -> None:
    """Else a model that became faster would be held to its old full batches, which its limits keep from ever forming."""
    service = measured((32, full_ms), (4, small_ms), times=40)

    assert (service.seen_batch, service.predicted_ms(32)) == (4, pytest.approx(small_ms))
