"""Utilization: the share of the last two seconds in which the model was running."""

import pytest

from gpu_pool.busy_share import BusyShare


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
    meter = BusyShare(window_s=2.0)
    for start, end in runs:
        meter.start(start)
        if end is not None:
            meter.stop(end)

    assert share == pytest.approx(meter.share(now))
