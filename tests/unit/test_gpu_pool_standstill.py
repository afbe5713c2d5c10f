"""What was read after a standstill may be older than it says."""

import pytest

from gpu_pool.model_process.handle import DOUBT_S, GAP_S, TICK_S, StallDetector


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("gaps", "later", "doubt"),
    [
        ([TICK_S] * 5, 0.0, False),
        ([GAP_S - 0.01], 0.0, False),  # a busy loop
        ([], GAP_S + 0.01, True),  # read before the tick that is due
        ([GAP_S + 0.01], 0.0, True),  # read after it
        ([GAP_S + 0.01, TICK_S], 0.0, True),
        ([GAP_S + 0.01], DOUBT_S, False),
        ([5.0, TICK_S, TICK_S, TICK_S], 0.0, False),
    ],
)
def test_doubt_lasts_from_the_standstill_until_the_socket_was_read(
    gaps: list[float], later: float, doubt: bool
) -> None:
    """The gaps are between ticks; `later` is the time from the last one to the question."""
    clock = Clock()
    standstill = StallDetector(clock)
    for gap in gaps:
        clock.now += gap
        standstill.tick()
    clock.now += later

    assert standstill.in_doubt() is doubt
