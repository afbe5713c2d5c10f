"""Capacity: rates and bounds by literal tables, and the estimator against pools of GPUs in virtual time."""

import random

import pytest

from capacity_simulation import Gpu, RunMs, Second, Simulation
from ratelimit.capacity import CapacityEstimator, CapacityEvidence, GpuRate, PoolLoad, PoolRate

CALM, LIMITING, BACKLOG = PoolLoad(False, False), PoolLoad(False, True), PoolLoad(True, True, 50.0)


@pytest.mark.parametrize(
    ("gpus", "batch", "full", "most", "confidence"),
    [
        ([], 32, 0.0, 0.0, 0.0),
        ([GpuRate()], 32, 0.0, 0.0, 0.0),  # nothing was measured
        ([GpuRate(50.0, 0.0, 32.0)], 0, 0.0, 0.0, 0.0),  # no model is enabled
        ([GpuRate(50.0, 0.0, 32.0)], 32, 640.0, 640.0, 1.0),
        ([GpuRate(50.0, 0.0, 32.0)], 8, 160.0, 160.0, 1.0),  # an admin made the batches smaller
        ([GpuRate(10.0, 1.0, 16.0)], 32, 32_000 / 42, 32_000 / 26, 0.5),  # at most as fast as a batch of 16
        ([GpuRate(50.0, 0.0, 32.0, 4)], 32, 2560.0, 2560.0, 1.0),  # four batches at a time
        ([GpuRate(50.0, 0.0, 32.0), GpuRate()], 32, 1280.0, 1280.0, 0.5),  # a new GPU counts as the median
        ([GpuRate(50.0, 0.0, 32.0), GpuRate(500.0, 0.0, 32.0)], 32, 704.0, 704.0, 1.0),  # a slow one as what it does
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
    """The sum of what each GPU does with full batches, an upper bound of it, and how sure both are."""
    assert PoolRate.of(gpus, batch) == pytest.approx((full, most, confidence))


def test_a_guess_binds_nobody() -> None:
    """Before a batch was measured, the model's row gives a figure for predicted waits, on which no limit is built."""
    capacity = CapacityEstimator().look([GpuRate(), GpuRate()], 32, 100.0, LIMITING, 0.0)

    assert (capacity.rps, capacity.evidence, capacity.binding) == (200.0, CapacityEvidence.PRIOR, False)


@pytest.mark.parametrize(
    ("seen", "load", "seconds", "rps"),
    [
        (8.0, CALM, 4, 32_000 / 42),  # no limit is in the way: nothing to learn
        (8.0, LIMITING, 1, min(2 * 32_000 / 42, 32_000 / 18)),  # twice as much within a second
        (8.0, LIMITING, 4, 32_000 / 18),  # never more than if larger batches took no longer
        (32.0, LIMITING, 4, 32_000 / 42),  # full batches were measured: there is no more
    ],
)
def test_an_estimate_from_small_batches_is_probed_while_it_limits(
    seen: float, load: PoolLoad, seconds: int, rps: float
) -> None:
    """Upwards, and only where somebody is refused although nothing waits."""
    estimator, gpus = CapacityEstimator(), [GpuRate(10.0, 1.0, seen)]
    for heartbeat in range(4 * seconds + 1):
        capacity = estimator.look(gpus, 32, 20.0, load, heartbeat / 4)

    assert capacity.rps == pytest.approx(rps)


def test_under_backlog_the_served_rate_is_the_capacity() -> None:
    """Once the backlog lasts; then it holds for some seconds, and is probed the faster the longer none comes back."""
    estimator, gpus = CapacityEstimator(), [GpuRate(50.0, 0.0, 32.0, served_rps=320.0)]

    def look(load: PoolLoad, now: float) -> float:
        return estimator.look(gpus, 32, 20.0, load, now).rps

    assert [look(BACKLOG, heartbeat / 4) for heartbeat in range(13)] == [640.0] * 12 + [320.0]
    assert [look(LIMITING, 3 + second) for second in range(1, 4)] == pytest.approx([320.0, 320.0, 352.0])
    assert [round(look(LIMITING, 3 + second)) for second in range(4, 9)] == [387, 503, 640, 640, 640]


def test_what_was_served_before_the_rates_moved_is_no_capacity() -> None:
    """A model that became faster under backlog: the served rate is still that of before."""
    estimator = CapacityEstimator()
    for heartbeat in range(4):
        estimator.look([GpuRate(200.0, 0.0, 32.0, served_rps=160.0)], 32, 20.0, BACKLOG, heartbeat / 4)
    for heartbeat in range(4, 15):
        capacity = estimator.look([GpuRate(50.0, 0.0, 32.0, served_rps=160.0)], 32, 20.0, BACKLOG, heartbeat / 4)

    assert capacity.rps == 640.0


def flat(ms: float) -> RunMs:
    return lambda _size, _now: ms


def line(base_ms: float, item_ms: float) -> RunMs:
    return lambda size, _now: base_ms + size * item_ms


def step(at_s: float, before: RunMs, after: RunMs) -> RunMs:
    return lambda size, now: (before if now < at_s else after)(size, now)


def noisy(run_ms: RunMs, seed: int) -> RunMs:
    """Times from half to one and a half."""
    chance = random.Random(seed)
    return lambda size, now: run_ms(size, now) * chance.uniform(0.5, 1.5)


def refused(seconds: list[Second], first: int, last: int) -> float:
    """The share of what was offered from one second up to another that was refused."""
    return sum(s.refused for s in seconds[first:last]) / sum(s.offered for s in seconds[first:last])


MODELS: dict[str, tuple[RunMs, float]] = {
    "one time for any batch": (flat(50), 640.0),
    "a base and a time an item": (line(30, 1), 32_000 / 62),
    "no gain from batches": (line(0, 20), 50.0),
    "long runs": (flat(1000), 32.0),
} | {f"noise {seed}": (noisy(line(30, 1), seed), 32_000 / 62) for seed in range(1, 6)}
"""What a batch takes, and the true requests/s of one such GPU."""


@pytest.mark.parametrize("prior", [0.1, 1.0, 10.0], ids=["prior too low", "prior right", "prior too high"])
@pytest.mark.parametrize("model", MODELS)
def test_half_of_the_capacity_is_served_whole_from_cold(model: str, prior: float) -> None:
    """Nothing was measured and the prior may be wrong by ten times: under 1 % is refused in any part of the run."""
    run_ms, rps = MODELS[model]
    seconds = Simulation([Gpu(run_ms) for _ in range(4)], lambda _: 2 * rps, prior_rps=prior * rps).run(12)

    assert refused(seconds, 0, 5) < 0.01
    assert refused(seconds, 5, 12) < 0.01


@pytest.mark.parametrize("prior", [0.1, 10.0], ids=["prior too low", "prior too high"])
@pytest.mark.parametrize("model", MODELS)
def test_twice_the_capacity_keeps_the_gpus_busy(model: str, prior: float) -> None:
    """From the tenth second on they serve 95 % of what they can, nothing is late, and the estimate moves by less than 15 %."""
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
    """Within ten seconds nothing is refused at half of the new capacity, and all of it is served at twice as much."""
    gpus = [Gpu(step(10, before, after)) for _ in range(4)]
    seconds = Simulation(gpus, lambda _: 4 * load * rps, target=0.95).run(30)

    if load < 1:
        assert refused(seconds, 20, 30) < 0.01
    else:
        served = [second.served for second in seconds[20:]]
        assert sum(served) >= 0.9 * 4 * rps * len(served)
        assert seconds[20].capacity_rps == pytest.approx(4 * rps, rel=0.15)


def test_workers_that_differ_by_ten_times_count_as_what_each_does() -> None:
    """Three fast ones and a slow one, at twice what they do together."""
    gpus = [Gpu(flat(50)), Gpu(flat(50)), Gpu(flat(50)), Gpu(flat(500))]
    seconds = Simulation(gpus, lambda _: 4000, target=1.0).run(20)

    assert seconds[-1].capacity_rps == pytest.approx(1984, rel=0.05)
    assert sum(second.served for second in seconds[10:]) >= 0.95 * 1984 * 10


def test_batches_that_cannot_fill_are_found_by_what_is_served() -> None:
    """A budget of tokens ends batches at 8 of 32: no full one is ever measured, and the estimate settles all the same."""
    true = 4 * 8 * 1000 / 28
    seconds = Simulation([Gpu(line(20, 1), effective_batch=8) for _ in range(4)], lambda _: 2 * true).run(40)
    estimates = [second.capacity_rps for second in seconds[10:]]

    assert max(estimates) < 1.15 * true
    assert min(estimates) > 0.85 * true
    assert sum(second.served for second in seconds[10:]) >= 0.9 * true * 30


def test_batches_that_an_admin_resizes_are_known_at_once_or_learnt() -> None:
    """32 to 8 by what was measured, and on to 64, which was not, within three seconds."""

    def resize(simulation: Simulation, second: int) -> None:
        simulation.batch = 32 if second < 10 else 8 if second < 20 else 64

    seconds = Simulation([Gpu(line(40, 0.5)) for _ in range(4)], lambda _: 5000).run(30, resize)

    assert seconds[9].capacity_rps == pytest.approx(4 * 32_000 / 56, rel=0.05)
    assert seconds[10].capacity_rps == pytest.approx(4 * 8_000 / 44, rel=0.05)
    assert seconds[23].capacity_rps == pytest.approx(4 * 64_000 / 72, rel=0.1)


def test_hours_of_idleness_unlearn_nothing() -> None:
    """A burst at nine tenths of the capacity after a long silence is served whole."""
    gpus = [Gpu(line(30, 1)) for _ in range(4)]
    rps = 4 * 32_000 / 62
    seconds = Simulation(gpus, lambda now: 2 * rps if now < 5 else 0.0 if now < 600 else 0.9 * rps).run(610)

    assert refused(seconds, 600, 610) < 0.01


def test_a_lost_gpu_counts_no_more_at_once() -> None:
    """Half of the GPUs gone: half of the capacity with the next look."""

    def lose(simulation: Simulation, second: int) -> None:
        if second == 10:
            del simulation.gpus[2:]

    seconds = Simulation([Gpu(flat(50)) for _ in range(4)], lambda _: 2000).run(14, lose)

    assert [round(second.capacity_rps) for second in seconds[9:12]] == [2560, 1280, 1280]
