"""The `limits` library as direct mode uses it: what a window lets in, also while its limit changes, and what it leaves."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import RateLimitItem, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from gateway.direct.limits import REQUEST, bucket
from ratelimit.sliding_window import LocalLimit, SlidingWindows

SECOND_US = 1_000_000


def admitted(strategy: SlidingWindowCounterRateLimiter, limit: RateLimitItem, tries: int) -> int:
    return sum(strategy.hit(limit, "customer") for _ in range(tries))


def of_ours(amount: int) -> RateLimitItem:
    return LocalLimit(amount, 3600 * SECOND_US)


def of_the_library(amount: int) -> RateLimitItem:
    return RateLimitItemPerSecond(amount, 3600)


@pytest.mark.parametrize(
    ("make", "storage", "more"), [(of_ours, SlidingWindows(10), 0), (of_the_library, MemoryStorage(), 4)]
)
def test_a_lowered_limit_hands_out_nothing(
    make: Callable[[int], RateLimitItem], storage: MemoryStorage, more: int
) -> None:
    """Five used, the limit lowered to four: none more. The library by itself counts under the amount, and lets in four."""
    strategy = SlidingWindowCounterRateLimiter(storage)

    assert (admitted(strategy, make(5), 9), admitted(strategy, make(4), 9)) == (5, more)


class Door:
    """One bucket that may change, at a time that is set."""

    def __init__(self) -> None:
        self.windows = SlidingWindows(10)
        self.strategy = SlidingWindowCounterRateLimiter(self.windows)

    def lets_in(self, rate: float, burst: float, now_us: int) -> bool:
        self.windows.now_us = now_us
        limit, _ = bucket(rate, burst, REQUEST)
        self.windows.meet("customer", limit, limit.amount)
        return self.strategy.hit(limit, "customer", cost=REQUEST)

    def wait_us(self, rate: float, burst: float) -> float:
        limit, _ = bucket(rate, burst, REQUEST)
        return self.windows.level("customer", limit).until_us(limit.amount - REQUEST)


limits_in_turn = st.lists(
    st.tuples(st.floats(0.5, 50.0), st.floats(1.0, 40.0), st.lists(st.floats(0.0, 0.9), min_size=1, max_size=30)),
    min_size=1,
    max_size=4,
)


@given(limits_in_turn)
def test_no_time_lets_in_more_than_the_bucket(turns: list[tuple[float, float, list[float]]]) -> None:
    """Between any two moments at most the largest bucket and what flowed in, while rate and bucket size change."""
    door, now, before, balance = Door(), 0.0, 0.0, 0.0
    most = max(2.0, *(burst for _, burst, _ in turns))
    lowest = 0.0  # Of what was let in less what flowed in: so far from it the balance may rise.
    for rate, burst, gaps in turns:
        for gap in gaps:
            now += gap
            balance -= gap * max(rate, before)  # The change is known with the first request after it.
            before = rate
            lowest = min(lowest, balance)
            while door.lets_in(rate, burst, int(now * SECOND_US)):
                balance += 1
            assert balance - lowest <= most + 0.001


@pytest.mark.parametrize(("rate", "burst"), [(0.25, 1.0), (0.25, 0.2), (1.0, 2.0), (3.0, 7.5), (40.0, 100.0)])
@pytest.mark.parametrize("offered", [1.1, 3.0, 50.0])
def test_all_of_the_rate_gets_through_and_no_more(rate: float, burst: float, offered: float) -> None:
    """Who always asks gets the rate in the long run, be it one request in four seconds, however often he asks."""
    door, seconds = Door(), 100.0 / rate
    every_us = int(SECOND_US / rate / offered)
    count = sum(door.lets_in(rate, burst, now_us) for now_us in range(0, int(seconds * SECOND_US), every_us))

    assert rate * seconds * 0.9 <= count <= max(2.0, burst) + rate * seconds


def test_a_limit_that_changes_all_the_time_still_lets_its_rate_through() -> None:
    """Four times a second another length: what is used becomes free at the rate all the same."""
    door, count = Door(), 0
    for step in range(20_000):
        rate = 10.0 + 0.1 * (step // 50 % 7)
        count += door.lets_in(rate, 10.0, step * 5000)

    assert 0.9 * 10.0 * 100 <= count <= 10.6 * 100 + 10


@given(st.floats(0.1, 100.0), st.floats(1.0, 200.0), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=100))
def test_the_wait_that_is_told_is_the_wait(rate: float, burst: float, gaps: list[float]) -> None:
    """After it there is room; a little before it there is none."""
    door, now_us = Door(), 0
    for gap in gaps:
        now_us += int(gap * SECOND_US)
        while door.lets_in(rate, burst, now_us):
            pass
    wait_us = door.wait_us(rate, burst)
    early_us = int(wait_us - bucket(rate, burst, REQUEST)[0].get_expiry() * 0.02)

    assert wait_us > 0
    assert early_us < 0 or not door.lets_in(rate, burst, now_us + early_us)
    assert door.lets_in(rate, burst, now_us + int(wait_us) + 1)


def test_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's storage starts one when it is made and sixty a second under load; ours leaves none and starts none."""
    before = threading.active_count()
    door, started = Door(), []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    for step in range(2000):
        door.lets_in(10.0, 10.0, step * 10_000)
    door.windows.reset()

    assert (threading.active_count(), started) == (before, [])


def test_a_limit_leaves_two_counters_and_too_many_limits_go() -> None:
    """However many windows it has lived through, and whatever names come; the last used stay."""
    windows = SlidingWindows(3)
    strategy = SlidingWindowCounterRateLimiter(windows)
    limit = LocalLimit(5, SECOND_US)
    for step in range(100):
        windows.now_us = step * SECOND_US // 3
        strategy.hit(limit, "constant")
        strategy.hit(limit, f"name {step}")
    assert (len(windows), windows.level("constant", limit).used > 0) == (3, True)
    assert len(windows.storage) <= 6

    windows.reset()
    assert (len(windows), len(windows.storage)) == (0, 0)
