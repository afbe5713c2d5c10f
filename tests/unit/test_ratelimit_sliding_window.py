"""The sliding window: what it admits, also while its limit changes, and what it stores."""

import threading

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.direct.limits import REQUEST, bucket
from ratelimit.sliding_window import LocalLimit, SlidingWindows

SECOND_US = 1_000_000


def test_a_lowered_limit_admits_nothing() -> None:
    """Five are used and the limit is lowered to four."""
    windows = SlidingWindows(10)
    limits = [LocalLimit(amount, 3600 * SECOND_US) for amount in (5, 4)]

    assert [sum(windows.spend("customer", limit) for _ in range(9)) for limit in limits] == [5, 0]


class Window:
    """One bucket that may change, on a virtual clock."""

    def __init__(self) -> None:
        self.windows = SlidingWindows(10)

    def admits(self, rate: float, burst: float, now_us: int) -> bool:
        self.windows.now_us = now_us
        limit, _ = bucket(rate, burst, REQUEST)
        self.windows.meet("customer", limit, limit.amount)
        return self.windows.spend("customer", limit, REQUEST)

    def wait_us(self, rate: float, burst: float) -> float:
        limit, _ = bucket(rate, burst, REQUEST)
        return self.windows.level("customer", limit).until_us(limit.amount - REQUEST)


PHASES = st.lists(
    st.tuples(st.floats(0.5, 50.0), st.floats(1.0, 40.0), st.lists(st.floats(0.0, 0.9), min_size=1, max_size=30)),
    min_size=1,
    max_size=4,
)


@given(PHASES)
@example([(1.0, 1.0, [0.0]), (0.75, 1.0, [0.0, 0.75]), (1.0, 1.0, [0.0, 0.5, 0.5, 0.5, 0.75])])
def test_no_interval_exceeds_the_bucket(phases: list[tuple[float, float, list[float]]]) -> None:
    """Between any two times at most the largest bucket and what refilled it, while rate and bucket size change."""
    window, now, before, balance = Window(), 0.0, 0.0, 0.0
    largest = max(2.0, *(burst for _, burst, _ in phases))
    lowest = 0.0  # Of admitted minus refilled: the balance may rise so far above it.
    for rate, burst, gaps in phases:
        for gap in gaps:
            now += gap
            balance -= gap * max(rate, before)  # A change applies with the first request after it.
            before = rate
            lowest = min(lowest, balance)
            while window.admits(rate, burst, int(now * SECOND_US)):
                balance += 1
            assert balance - lowest <= largest + 0.001


@pytest.mark.parametrize(("rate", "burst"), [(0.25, 1.0), (0.25, 0.2), (1.0, 2.0), (3.0, 7.5), (40.0, 100.0)])
@pytest.mark.parametrize("offered", [1.1, 3.0, 50.0])
def test_the_whole_rate_is_admitted(rate: float, burst: float, offered: float) -> None:
    """In the long run, at any rate, however often requests are sent."""
    window, seconds = Window(), 100.0 / rate
    every_us = int(SECOND_US / rate / offered)
    count = sum(window.admits(rate, burst, now_us) for now_us in range(0, int(seconds * SECOND_US), every_us))

    assert rate * seconds * 0.9 <= count <= max(2.0, burst) + rate * seconds


@given(st.floats(0.1, 100.0), st.floats(1.0, 200.0), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=100))
def test_the_wait_is_exact(rate: float, burst: float, gaps: list[float]) -> None:
    """After it a request is admitted; a little before it none is."""
    window, now_us = Window(), 0
    for gap in gaps:
        now_us += int(gap * SECOND_US)
        while window.admits(rate, burst, now_us):
            pass
    wait_us = window.wait_us(rate, burst)
    early_us = int(wait_us - bucket(rate, burst, REQUEST)[0].length_us * 0.02)

    assert wait_us > 0
    assert early_us < 0 or not window.admits(rate, burst, now_us + early_us)
    assert window.admits(rate, burst, now_us + int(wait_us) + 1)


def test_the_storage_is_bounded_and_starts_no_thread() -> None:
    """The least recently used limits are dropped."""
    before = threading.active_count()
    windows, limit = SlidingWindows(3), LocalLimit(5, SECOND_US)
    for step in range(100):
        windows.now_us = step * SECOND_US // 3
        windows.spend("constant", limit)
        windows.spend(f"name {step}", limit)

    assert (len(windows), windows.level("constant", limit).used > 0) == (3, True)
    windows.clear()
    assert (len(windows), threading.active_count()) == (0, before)
