"""Capacity, slew and Retry-After by literal tables, and the estimator with simulated pools of GPUs."""

import math
import random

import pytest

from capacity_simulation import Gpu, RunMs, Second, Simulation
from ratelimit.capacity import (
    CapacityEstimator,
    CapacityEvidence,
    GpuRate,
    PoolLoad,
    PoolRate,
    relax,
    retry_after_ms,
)

CALM, LIMITING, BACKLOG = PoolLoad(False, False), PoolLoad(False, True), PoolLoad(True, True, 50.0)


@pytest.mark.parametrize(
    ("gpus", "batch", "full", "most", "confidence"),
    [
        ([], 32, 0.0, 0.0, 0.0),
        ([GpuRate()], 32, 0.0, 0.0, 0.0),  # not measured
        ([GpuRate(50.0, 0.0, 32.0)], 0, 0.0, 0.0, 0.0),  # no model is enabled
        ([GpuRate(50.0, 0.0, 32.0)], 32, 640.0, 640.0, 1.0),
        ([GpuRate(50.0, 0.0, 32.0)], 8, 160.0, 160.0, 1.0),  # smaller batches by configuration
        ([GpuRate(10.0, 1.0, 16.0)], 32, 32_000 / 42, 32_000 / 26, 0.5),  # at most as fast as a batch of 16
        ([GpuRate(50.0, 0.0, 32.0, 4)], 32, 2560.0, 2560.0, 1.0),  # four batches at a time
        ([GpuRate(50.0, 0.0, 32.0), GpuRate()], 32, 1280.0, 1280.0, 0.5),  # a new GPU counts as the median
        (
            [GpuRate(50.0, 0.0, 32.0), GpuRate(500.0, 0.0, 32.0)],
            32,
            704.0,
            704.0,
            1.0,
        ),  # a slow one counts with its own rate
        (
            [GpuRate(50.0, 0.0, 32.0), GpuRate(50.0, 0.0, 32.0), GpuRate(500.0, 0.0, 32.0), GpuRate()],
            32,
            1984.0,
            1984.0,
            0.75,
        ),
    ],
)
def test_the_rates_of_a_pool(gpus: list[GpuRate], batch: int, full: float, most: float, confidence: float) -> None:
    """The rate of all GPUs with full batches, an upper bound of it, and the confidence in both."""
    assert PoolRate.of(gpus, batch) == pytest.approx((full, most, confidence))


def test_a_prior_limits_no_request() -> None:
    """Before a batch was measured, the model's row gives a capacity for predicted waits only."""
    capacity = CapacityEstimator().look([GpuRate(), GpuRate()], 32, 100.0, LIMITING, 0.0)

    assert (capacity.rps, capacity.evidence, capacity.binding) == (200.0, CapacityEvidence.PRIOR, False)


@pytest.mark.parametrize(
    ("seen", "load", "seconds", "rps"),
    [
        (8.0, CALM, 4, 32_000 / 42),  # no limit rejects: nothing to learn
        (8.0, LIMITING, 1, min(2 * 32_000 / 42, 32_000 / 18)),  # twice as much within a second
        (8.0, LIMITING, 4, 32_000 / 18),  # never more than if larger batches took no longer
        (32.0, LIMITING, 4, 32_000 / 42),  # full batches were measured: there is no more
    ],
)
def test_an_estimate_from_small_batches_is_probed_while_it_limits(
    seen: float, load: PoolLoad, seconds: int, rps: float
) -> None:
    """Upwards, and only while requests are rejected although none is queued."""
    estimator, gpus = CapacityEstimator(), [GpuRate(10.0, 1.0, seen)]
    for heartbeat in range(4 * seconds + 1):
        capacity = estimator.look(gpus, 32, 20.0, load, heartbeat / 4)

    assert capacity.rps == pytest.approx(rps)


def test_under_backlog_the_served_rate_is_the_capacity() -> None:
    """If the backlog lasts. It is valid for some seconds, then probed, faster as long as no backlog returns."""
    estimator, gpus = CapacityEstimator(), [GpuRate(50.0, 0.0, 32.0, served_rps=320.0)]

    def look(load: PoolLoad, now: float) -> float:
        return estimator.look(gpus, 32, 20.0, load, now).rps

    assert [look(BACKLOG, heartbeat / 4) for heartbeat in range(13)] == [640.0] * 12 + [320.0]
    assert [look(LIMITING, 3 + second) for second in range(1, 4)] == pytest.approx([320.0, 320.0, 352.0])
    assert [round(look(LIMITING, 3 + second)) for second in range(4, 9)] == [387, 503, 640, 640, 640]


def test_a_rate_served_before_a_change_of_speed_is_no_capacity() -> None:
    """A model became faster under backlog: the served rate is older."""
    estimator = CapacityEstimator()
    for heartbeat in range(4):
        estimator.look([GpuRate(200.0, 0.0, 32.0, served_rps=160.0)], 32, 20.0, BACKLOG, heartbeat / 4)
    for heartbeat in range(4, 15):
        capacity = estimator.look([GpuRate(50.0, 0.0, 32.0, served_rps=160.0)], 32, 20.0, BACKLOG, heartbeat / 4)

    assert capacity.rps == 640.0


@pytest.mark.parametrize(("interrupted", "pause_s"), [(True, 0.25), (False, 1.25)])
def test_a_rate_served_across_a_pause_is_no_capacity(interrupted: bool, pause_s: float) -> None:
    """All GPUs were lost for a moment, or nothing could be observed. The backlog must last again after that."""
    estimator, gpus = CapacityEstimator(), [GpuRate(50.0, 0.0, 32.0, served_rps=64.0)]
    for heartbeat in range(12):
        estimator.look(gpus, 32, 20.0, BACKLOG, heartbeat / 4)
    if interrupted:
        estimator.interrupt()
    back_s = 2.75 + pause_s
    capacities = [estimator.look(gpus, 32, 20.0, BACKLOG, back_s + heartbeat / 4).rps for heartbeat in range(13)]

    assert capacities == [640.0] * 12 + [64.0]


def flat(ms: float) -> RunMs:
    return lambda _size, _now: ms


def line(base_ms: float, item_ms: float) -> RunMs:
    return lambda size, _now: base_ms + size * item_ms


def step(at_s: float, before: RunMs, after: RunMs) -> RunMs:
    return lambda size, now: (before if now < at_s else after)(size, now)


def noisy(run_ms: RunMs, seed: int) -> RunMs:
    """Times of 50 to 150 %."""
    chance = random.Random(seed)
    return lambda size, now: run_ms(size, now) * chance.uniform(0.5, 1.5)


def rejected(seconds: list[Second], first: int, last: int) -> float:
    """The share of rejected requests in these seconds."""
    return sum(s.refused for s in seconds[first:last]) / sum(s.offered for s in seconds[first:last])


MODELS: dict[str, tuple[RunMs, float]] = {
    "one time for any batch": (flat(50), 640.0),
    "a base and a time an item": (line(30, 1), 32_000 / 62),
    "no gain from batches": (line(0, 20), 50.0),
    "long runs": (flat(1000), 32.0),
} | {f"noise {seed}": (noisy(line(30, 1), seed), 32_000 / 62) for seed in range(1, 6)}
"""The time of a batch, and the true requests/s of one such GPU."""


@pytest.mark.parametrize("prior", [0.1, 1.0, 10.0], ids=["prior too low", "prior right", "prior too high"])
@pytest.mark.parametrize("model", MODELS)
def test_half_of_the_capacity_is_served_from_a_cold_start(model: str, prior: float) -> None:
    """Even if the prior is wrong by a factor of ten, less than 1 % is rejected."""
    run_ms, rps = MODELS[model]
    seconds = Simulation([Gpu(run_ms) for _ in range(4)], lambda _: 2 * rps, prior_rps=prior * rps).run(12)

    assert rejected(seconds, 0, 5) < 0.01
    assert rejected(seconds, 5, 12) < 0.01


@pytest.mark.parametrize("prior", [0.1, 10.0], ids=["prior too low", "prior too high"])
@pytest.mark.parametrize("model", MODELS)
def test_twice_the_capacity_keeps_the_gpus_busy(model: str, prior: float) -> None:
    """From the tenth second on they serve 95 % of the capacity, nothing is late, and the estimate varies by less than 15 %."""
    run_ms, rps = MODELS[model]
    seconds = Simulation([Gpu(run_ms) for _ in range(4)], lambda _: 8 * rps, prior_rps=prior * rps, target=1.0).run(30)
    settled = seconds[10:]
    estimates = [second.capacity_rps for second in settled]

    assert sum(second.served for second in settled) >= 0.95 * 4 * rps * len(settled)
    assert max(estimates) < 1.15 * min(estimates)
    assert sum(second.late for second in settled) == 0
    assert sum(second.refused for second in settled) > 0.4 * sum(second.offered for second in settled)


@pytest.mark.parametrize(
    ("before", "after", "rps"),
    [
        (flat(50), flat(200), 160.0),
        (flat(200), flat(50), 640.0),
        (line(30, 1), line(120, 4), 32_000 / 248),
        (line(120, 4), line(30, 1), 32_000 / 62),
    ],
    ids=["slower", "faster", "slower by item", "faster by item"],
)
@pytest.mark.parametrize("load", [0.5, 2.0])
def test_a_model_that_changes_its_speed_fourfold_is_followed(
    before: RunMs, after: RunMs, rps: float, load: float
) -> None:
    """Within ten seconds nothing is rejected at half of the new capacity, and it is used completely at twice the load."""
    gpus = [Gpu(step(10, before, after)) for _ in range(4)]
    seconds = Simulation(gpus, lambda _: 4 * load * rps, target=0.95).run(30)

    if load < 1:
        assert rejected(seconds, 20, 30) < 0.01
    else:
        served = [second.served for second in seconds[20:]]
        assert sum(served) >= 0.9 * 4 * rps * len(served)
        assert seconds[20].capacity_rps == pytest.approx(4 * rps, rel=0.15)


def test_workers_of_different_speed_count_with_their_own_rates() -> None:
    """Three fast ones and a slow one, at twice their capacity."""
    gpus = [Gpu(flat(50)), Gpu(flat(50)), Gpu(flat(50)), Gpu(flat(500))]
    seconds = Simulation(gpus, lambda _: 4000, target=1.0).run(20)

    assert seconds[-1].capacity_rps == pytest.approx(1984, rel=0.05)
    assert sum(second.served for second in seconds[10:]) >= 0.95 * 1984 * 10


def test_batches_that_cannot_be_full_are_estimated_by_the_served_rate() -> None:
    """A token limit ends batches at 8 of 32, so no full one is ever measured."""
    true = 4 * 8 * 1000 / 28
    seconds = Simulation([Gpu(line(20, 1), effective_batch=8) for _ in range(4)], lambda _: 2 * true).run(40)
    estimates = [second.capacity_rps for second in seconds[10:]]

    assert max(estimates) < 1.15 * true
    assert min(estimates) > 0.85 * true
    assert sum(second.served for second in seconds[10:]) >= 0.9 * true * 30


def test_a_changed_batch_size_is_known_at_once_or_learned() -> None:
    """From 32 to 8 by the measurements, and to 64, which was not measured, within three seconds."""

    def resize(simulation: Simulation, second: int) -> None:
        simulation.batch = 32 if second < 10 else 8 if second < 20 else 64

    seconds = Simulation([Gpu(line(40, 0.5)) for _ in range(4)], lambda _: 5000).run(30, resize)

    assert seconds[9].capacity_rps == pytest.approx(4 * 32_000 / 56, rel=0.05)
    assert seconds[10].capacity_rps == pytest.approx(4 * 8_000 / 44, rel=0.05)
    assert seconds[23].capacity_rps == pytest.approx(4 * 64_000 / 72, rel=0.1)


def test_the_capacity_is_known_after_idle_hours() -> None:
    """A burst at 90 % of the capacity is served completely."""
    gpus = [Gpu(line(30, 1)) for _ in range(4)]
    rps = 4 * 32_000 / 62
    seconds = Simulation(gpus, lambda now: 2 * rps if now < 5 else 0.0 if now < 600 else 0.9 * rps).run(610)

    assert rejected(seconds, 600, 610) < 0.01


@pytest.mark.parametrize(
    ("previous", "target", "elapsed_s", "now"),
    [
        (1.0, 0.2, 0.01, 0.2),  # tightens at once
        (0.2, 1.0, 1.0, 0.45),  # relaxes slowly
        (0.9, 1.0, 1.0, 1.0),
        (0.2, 1.0, -5.0, 0.2),  # the clock went back
    ],
)
def test_slew(previous: float, target: float, elapsed_s: float, now: float) -> None:
    """Limits fall in one step and rise over seconds."""
    assert relax(previous, target, elapsed_s) == pytest.approx(now)


def test_a_flapping_gpu_does_not_make_the_limits_flap() -> None:
    """The factor stays low until the GPU is stable."""
    steps = [  # seconds, factor of the capacity, effective factor
        (0.00, 1.0, 1.0),
        (0.25, 0.5, 0.5),
        (1.25, 1.0, 0.75),
        (1.50, 0.5, 0.5),
        (2.50, 1.0, 0.75),
        (2.75, 0.5, 0.5),
        (3.00, 1.0, 0.5625),
        (4.00, 1.0, 0.8125),
        (5.00, 1.0, 1.0),
    ]
    factor, at = 1.0, 0.0
    for now, target, expected in steps:
        factor, at = relax(factor, target, now - at), now
        assert factor == pytest.approx(expected), now


@pytest.mark.parametrize(
    ("waiting", "drain_rps", "fallback_ms", "expected_ms"),
    [
        (50, 100.0, 7.0, 500),
        (1, 3.0, 7.0, 333),
        (0, 100.0, 7.0, 100),  # the minimum
        (10_000, 10.0, 7.0, 30_000),  # the maximum
        (50, 0.0, 700.4, 700),  # no recent responses
        (50, 0.0, 7.0, 100),
        (50, 0.0, 86_400_000.0, 30_000),
        (50, 0.0, math.inf, 30_000),
        (50, 1e-300, 7.0, 30_000),
        (50, math.inf, 7.0, 100),
        (50, math.nan, 700.0, 700),
        (50, 0.0, math.nan, 100),
    ],
)
def test_retry_after_is_the_time_to_drain_the_queue(
    waiting: int, drain_rps: float, fallback_ms: float, expected_ms: int
) -> None:
    """By the measured drain rate, 100 ms to 30 s, also for infinite and undefined values."""
    assert retry_after_ms(waiting, drain_rps, fallback_ms) == expected_ms
