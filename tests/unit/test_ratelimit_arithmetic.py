"""Slew and Retry-After, by literal tables."""

import math

import pytest

from ratelimit.capacity import relax, retry_after_ms


@pytest.mark.parametrize(
    ("previous", "target", "elapsed_s", "now"),
    [
        (1.0, 0.2, 0.01, 0.2),  # tighten at once
        (0.2, 1.0, 1.0, 0.45),  # relax slowly
        (0.9, 1.0, 1.0, 1.0),
        (0.2, 1.0, -5.0, 0.2),  # a clock that went back relaxes nothing
    ],
)
def test_slew(previous: float, target: float, elapsed_s: float, now: float) -> None:
    """Limits fall in one step and come back over seconds."""
    assert relax(previous, target, elapsed_s) == pytest.approx(now)


def test_a_gpu_that_flaps_does_not_make_the_limits_flap() -> None:
    """It comes back every other second: what is announced stays low, until it stays."""
    played = [
        # seconds, what the capacity allows, what is announced
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
    announced, at = 1.0, 0.0
    for now, target, expected in played:
        announced, at = relax(announced, target, now - at), now
        assert announced == pytest.approx(expected), now


@pytest.mark.parametrize(
    ("waiting", "drain_rps", "fallback_ms", "told_ms"),
    [
        (50, 100.0, 7.0, 500),
        (1, 3.0, 7.0, 333),
        (0, 100.0, 7.0, 100),  # never at once
        (10_000, 10.0, 7.0, 30_000),  # never longer than a client would wait
        (50, 0.0, 700.4, 700),  # nothing was answered lately
        (50, 0.0, 7.0, 100),
        (50, 0.0, 86_400_000.0, 30_000),
        (50, 0.0, math.inf, 30_000),
        (50, 1e-300, 7.0, 30_000),
        (50, math.inf, 7.0, 100),
        (50, math.nan, 700.0, 700),
        (50, 0.0, math.nan, 100),
    ],
)
def test_retry_after_is_how_long_the_line_takes(
    waiting: int, drain_rps: float, fallback_ms: float, told_ms: int
) -> None:
    """Who waits, by the measured drain; 100 ms to 30 s; what is no number is told as one all the same."""
    assert retry_after_ms(waiting, drain_rps, fallback_ms) == told_ms
