"""Rates of a model that runs batches: busy share, served rate."""

import pytest

from gpu_pool.worker.batch_rates import BusyShare, ServedRate


@pytest.mark.parametrize(
    ("runs", "share"),
    [
        ([(9.0, 9.5)], 0.25),
        ([(7.5, 8.5)], 0.25),
        ([(5.0, 8.0)], 0.0),
        ([(8.0, 9.0), (9.0, 10.0)], 1.0),
        ([(9.0, None)], 0.5),
        ([(1.0, None)], 1.0),
    ],
)
def test_busy_share(runs: list[tuple[float, float | None]], share: float) -> None:
    """Busy seconds of the last two, at second 10; None is a run that has not ended."""
    busy = BusyShare(window_s=2.0)
    for start, end in runs:
        busy.start(start)
        if end is not None:
            busy.stop(end)

    assert busy.share(10.0) == pytest.approx(share)


@pytest.mark.parametrize(
    ("ended", "rps"),
    [
        ([(1.0, 32)], 0.0),
        ([(1.0, 8), (1.05, 32), (1.1, 32), (1.15, 16)], 80 / 0.15),
        ([(1.0, 32), (3.0, 32), (5.0, 32), (7.0, 32), (9.0, 32)], 16.0),  # The last three of long runs.
        ([(1.0, 99), (2.0, 99), *((3 + i / 20, 32) for i in range(40))], 640.0),  # The last 1.25 s of short runs.
    ],
)
def test_served_rate(ended: list[tuple[float, int]], rps: float) -> None:
    """Requests/s from the end of the first kept run to the end of the last."""
    served = ServedRate(window_s=1.25)
    for now, size in ended:
        served.ended(now, size)

    assert served.rps == pytest.approx(rps)
