"""Utilization: the share of the last two seconds in which the model was running."""

import pytest

from gpu_pool.worker.concurrency import BusyShare, ServedRate


@pytest.mark.parametrize(
    ("runs", "now", "share"),
    [
        ([], 10.0, 0.0),
        ([(9.0, 9.5)], 10.0, 0.25),
        ([(7.5, 8.5)], 10.0, 0.25),  # half of it is out of the window
        ([(5.0, 8.0)], 10.0, 0.0),
        ([(8.0, 9.0), (9.0, 10.0)], 10.0, 1.0),
        ([(9.0, None)], 10.0, 0.5),  # still running
        ([(1.0, None)], 10.0, 1.0),
    ],
)
def test_share_of_the_window(runs: list[tuple[float, float | None]], now: float, share: float) -> None:
    """Busy seconds of the last two, over two."""
    demand_meter = BusyShare(window_s=2.0)
    for start, end in runs:
        demand_meter.start(start)
        if end is not None:
            demand_meter.stop(end)

    assert share == pytest.approx(demand_meter.share(now))


@pytest.mark.parametrize(
    ("ended", "rps"),
    [
        ([], 0.0),
        ([(1.0, 32)], 0.0),  # one end says nothing of how long it took
        ([(1.0, 32), (1.05, 32)], 640.0),
        ([(1.0, 8), (1.05, 32), (1.1, 32), (1.15, 16)], 80 / 0.15),
        ([(1.0, 32), (3.0, 32), (5.0, 32), (7.0, 32), (9.0, 32)], 16.0),  # of long runs the last three
        ([(1.0, 99), (2.0, 99), *((3 + i / 20, 32) for i in range(40))], 640.0),  # of short ones the last 1.25 s
    ],
)
def test_served_rate_of_the_last_runs(ended: list[tuple[float, int]], rps: float) -> None:
    """Requests/s from the end of the first to the end of the last."""
    served = ServedRate(window_s=1.25)
    for now, size in ended:
        served.ended(now, size)

    assert served.rps == pytest.approx(rps)
