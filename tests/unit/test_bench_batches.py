"""Fill of batches and the share of time in which GPUs ran, from what audit rows say."""

import pytest

from tierlane.bench.resources import Ran, batch_use


def test_fill_and_busy_share_are_of_whole_batches() -> None:
    """Two workers, 10 s: one ran half of the time, the other a tenth of it."""
    ran = [Ran(64, 50.0, "a", 64)] * 100 + [Ran(32, 50.0, "b", 31)] * 20

    use = batch_use(ran, 64, 2, 10.0)

    assert (use.batches, use.requests, use.workers) == (120, 64 * 100 + 31 * 20, 2)
    assert use.mean_size == pytest.approx((64 * 100 + 32 * 20) / 120)
    assert use.fill == pytest.approx(use.mean_size / 64)
    assert use.gpu_busy == pytest.approx((5.0 + 1.0) / 20.0)
    assert use.sizes == {32: 20, 64: 100}


def test_workers_that_nobody_listed_are_those_that_were_seen() -> None:
    """Beside a system that `tierlane up` did not start."""
    assert batch_use([Ran(1, 100.0, "a", 1), Ran(1, 100.0, "b", 1)], None, 0, 1.0).gpu_busy == pytest.approx(0.1)


def test_without_batches_nothing_is_claimed() -> None:
    """No mean of nothing, no division by nothing."""
    use = batch_use([], 64, 0, 10.0)

    assert (use.mean_size, use.fill, use.mean_gpu_ms, use.gpu_busy, use.sizes) == (None, None, None, None, {})
