"""Batch windows in simulated time: the adaptive policy against a fixed window."""

import pytest
from batch_windows import Pool, Simulation, adaptive, fixed, speculative

from scheduler.batching.service import Service

MANY, FEW = Pool(34, 64, Service(50.0), 40.0), Pool(4, 64, Service(50.0, 0.3), 40.0)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("rate", "mean_wait_ms", "fill"), [(10.0, 0.01, 1.0), (1000.0, 5.0, 5.0), (10_000.0, 5.0, 57.6)]
)
def test_waits_and_fill(rate: float, mean_wait_ms: float, fill: float) -> None:
    """Requests do not wait in an idle system, and batches are nine tenths full at high load."""
    result = Simulation(MANY, adaptive(MANY), rate, seed=1).run(max(2000, int(rate * 2)))

    settled = result.sizes[len(result.sizes) // 2 : -1]
    assert mean(result.waits) <= mean_wait_ms
    assert sum(settled) / len(settled) >= fill


@pytest.mark.parametrize("rate", [20.0, 200.0, 2000.0, 3000.0])
@pytest.mark.parametrize("pool", [MANY, FEW])
def test_never_slower_than_a_fixed_window(pool: Pool, rate: float) -> None:
    """The mean wait is at most that of a fixed window at any load that the workers can serve."""
    ours, theirs = (Simulation(pool, policy(pool), rate, seed=2).run(8000) for policy in (adaptive, fixed))

    assert mean(ours.waits) <= mean(theirs.waits) * 1.05


@pytest.mark.parametrize("rate", [30.0, 300.0, 1500.0])
def test_speculative_windows_gain_nothing(rate: float) -> None:
    """Windows that end when the expected arrivals do not fill the batch are as good as those of the policy (docs/decisions.md)."""
    pool = Pool(8, 32, Service(50.0, 1.0), 40.0)
    ours, theirs = (Simulation(pool, policy(pool), rate, seed=2).run(8000) for policy in (adaptive, speculative))

    assert mean(ours.waits) == pytest.approx(mean(theirs.waits), abs=0.5)
    assert ours.busy == pytest.approx(theirs.busy, abs=0.01)
