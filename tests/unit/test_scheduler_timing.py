"""Arrival rate, batch size, window and service time, by literal tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.batching.arrival_rate import ArrivalRate
from scheduler.batching.service import UNKNOWN, Service, pool_service
from scheduler.batching.target_size import target_size, window_ms
from scheduler.protocol.pool_view import WorkerView


@pytest.mark.parametrize(
    ("events", "at", "rate"),
    [
        ([], 1.0, 0.0),
        ([(5, 0.0)], 0.0, 0.0),  # one record gives no rate
        ([(0, 0.0), (100, 1.0)], 1.0, 93.75),  # four half-lives of 100/s
        ([(0, 0.0), (100, 1.0)], 1.25, 46.875),  # a quarter second of silence halves it
        ([(0, 0.0), (3, 0.0), (100, 1.0)], 1.0, 96.5625),  # two records at one time are one
    ],
)
def test_arrival_rate(events: list[tuple[int, float]], at: float, rate: float) -> None:
    """It decays with a half-life of a quarter second, also without arrivals."""
    arrivals = ArrivalRate(half_life_s=0.25)
    for count, time in events:
        arrivals.record(count, time)

    assert arrivals.per_second(at) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("rate", "workers", "base_ms", "item_ms", "size"),
    [
        (0.0, 34, 50.0, 0.0, 1),
        (10.0, 34, 50.0, 0.0, 1),
        (100.0, 34, 50.0, 0.0, 1),  # 5 of 34 workers: no request waits for another one
        (1_000.0, 34, 50.0, 0.0, 8),  # 1.6 by the workers, 8 by the cost of a batch in the scheduler
        (5_000.0, 34, 50.0, 0.0, 40),
        (10_000.0, 34, 50.0, 0.0, 64),
        (100.0, 4, 50.0, 0.0, 1),
        (200.0, 4, 50.0, 0.0, 2),  # 10 s of runs per second, on 3.6 s of workers
        (2_000.0, 4, 50.0, 0.0, 27),
        (2_000.0, 4, 50.0, 1.0, 62),  # of the 3.6 s, 2 s are for the items
        (4_000.0, 4, 50.0, 1.0, 64),  # more than full batches can serve
        (100.0, 1, 0.0, 8.0, 1),  # without a base time a batch saves nothing
        (9_999.0, 0, 50.0, 0.0, 64),
        (100.0, 34, 0.0, 0.0, 1),  # nothing is measured yet
    ],
)
def test_target_size(rate: float, workers: int, base_ms: float, item_ms: float, size: int) -> None:
    """The size with which workers and scheduler can serve the load, and 1 if single requests can be served."""
    assert target_size(rate, workers, Service(base_ms, item_ms), 64) == size


@pytest.mark.parametrize(
    ("target", "rate", "longest_ms"),
    [(1, 100.0, 0.0), (8, 1000.0, 16.0), (64, 10_000.0, 12.8), (2, 30.0, 40.0), (5, 0.0, 0.0)],
)
def test_window(target: int, rate: float, longest_ms: float) -> None:
    """Twice the time in which that many requests arrive, at most the model's window; 0 if none is expected."""
    assert window_ms(target, rate, 40.0) == longest_ms


RATES, TIMES = st.floats(0, 1e6), st.floats(0, 1000)


@given(RATES, st.integers(0, 300), TIMES, TIMES, st.integers(1, 512))
def test_the_size_is_between_one_and_a_full_batch(
    rate: float, workers: int, base_ms: float, item_ms: float, most: int
) -> None:
    """For every measurement, and it does not fall with more arrivals."""
    service = Service(base_ms, item_ms)

    size = target_size(rate, workers, service, most)

    assert 1 <= size <= most
    assert target_size(2 * rate, workers, service, most) >= size


def worker(
    base_ms: float, item_ms: float, seen_batch: float = 8.0, p95_ms: float = 60.0, *, healthy: bool = True
) -> WorkerView:
    return WorkerView(
        "w", "ready", 0.5, 1, 1.0, p95_ms, "b", "v", "", base_ms, item_ms, seen_batch, age_ms=10.0, healthy=healthy
    )


def test_the_service_of_a_pool() -> None:
    """The mean of healthy workers with measurements; without any, the previous values."""
    before = Service(7.0, 1.0, 4.0)
    bad = [worker(900.0, 9.0, healthy=False), worker(900.0, 9.0, seen_batch=0.0)]

    good = [worker(40.0, 0.5), worker(60.0, 1.5, 6.0)]
    assert pool_service([*good, *bad], UNKNOWN)[:3] == (50.0, 1.0, 6.0)
    assert pool_service(bad, before) == before


@pytest.mark.parametrize(("p95_ms", "steady"), [(50.0, True), (62.0, True), (63.0, False), (40.0, True), (39.0, False)])
def test_runs_are_steady_if_the_longest_take_the_expected_time(p95_ms: float, steady: bool) -> None:
    """Within a quarter of the time of the largest batch, on every worker."""
    workers = [worker(42.0, 1.0, 8.0, 50.0), worker(42.0, 1.0, 8.0, p95_ms)]

    assert pool_service(workers, UNKNOWN).steady is steady


@pytest.mark.parametrize(("other_ms", "steady"), [(50.0, True), (60.0, True), (64.0, False), (200.0, False)])
def test_workers_of_different_speed_are_not_steady(other_ms: float, steady: bool) -> None:
    """The mean of a fast and a slow worker would slow down the fast one."""
    workers = [worker(50.0, 0.0, 8.0, 50.0), worker(other_ms, 0.0, 8.0, other_ms)]

    assert pool_service(workers, UNKNOWN).steady is steady
