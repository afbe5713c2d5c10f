"""Who fails too often to say who it is has to wait; counting costs no thread, no task and no memory without end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.throttle import AuthThrottle, bucket_of
from scheduler.errors import StartError


class Clock:
    """Seconds that stand still, at the beginning of a window of a minute."""

    now = 6000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The throttle's clock."""
    return Clock()


def failures(throttle: AuthThrottle, count: int, address: str = "192.0.2.1") -> list[int | None]:
    """What so many failures are told."""
    return [throttle.failed(address) for _ in range(count)]


def test_thirty_failures_a_minute_are_let_be_and_the_next_ones_have_to_wait(clock: Clock) -> None:
    """Until the window ends, where nothing was before it."""
    throttle = AuthThrottle(clock=clock)
    clock.now += 15

    assert failures(throttle, 30) == [None] * 30
    assert failures(throttle, 5) == [45_001] * 5
    assert throttle.rejected == 5


@given(
    st.lists(st.tuples(st.floats(0, 40), st.integers(1, 12)), min_size=1, max_size=30),
    st.integers(1, 10),
)
def test_the_wait_is_always_enough_and_never_long(steps: list[tuple[float, int]], amount: int) -> None:
    """Whatever came before: after it one failure is let be, a millisecond or two earlier none; it is under a minute."""
    clock = Clock()
    throttle = AuthThrottle(f"{amount}/minute", clock=clock)
    for pause, count in steps:
        clock.now += pause
        for _ in range(count):
            wait_ms = throttle.failed("192.0.2.1")
            if wait_ms is None:
                continue
            assert 0 < wait_ms <= 60_001
            began = clock.now
            clock.now = began + max(0, wait_ms - 3) / 1000
            assert throttle.failed("192.0.2.1") is not None or wait_ms <= 3
            clock.now = began + (wait_ms + 1) / 1000
            assert throttle.failed("192.0.2.1") is None


def test_a_window_slides_so_that_its_edge_gives_no_second_budget(clock: Clock) -> None:
    """Thirty at the end of a minute leave next to nothing at the beginning of the next."""
    throttle = AuthThrottle(clock=clock)
    clock.now += 59
    failures(throttle, 30)

    clock.now += 2
    let_be = failures(throttle, 30).count(None)

    assert let_be == 1


def test_refused_failures_are_not_counted(clock: Clock) -> None:
    """Who kept knocking is let be as soon as who kept still."""
    throttle = AuthThrottle(clock=clock)
    failures(throttle, 30)
    failures(throttle, 1000)

    clock.now += 60 + 30

    assert failures(throttle, 16).count(None) == 15


def test_each_address_has_its_own_count(clock: Clock) -> None:
    """One that knocks too often takes nothing from another."""
    throttle = AuthThrottle("2/minute", clock=clock)
    failures(throttle, 10)

    assert failures(throttle, 3, "192.0.2.2")[:2] == [None, None]


def test_an_ipv6_network_counts_as_one_address(clock: Clock) -> None:
    """Everybody has 2^64 addresses of it."""
    throttle = AuthThrottle("2/minute", clock=clock)

    told = [throttle.failed(f"2001:db8:1:2:{number:x}::1") for number in range(5)]

    assert told[:2] == [None, None]
    assert None not in told[2:]
    assert throttle.failed("2001:db8:1:3::1") is None


@pytest.mark.parametrize(
    ("address", "same_as"),
    [
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:0DB8:0:0:ffff::"),
        ("fe80::1%eth0", "fe80::2"),
        (None, ""),
        ("/run/gateway.sock:1", None),
    ],
)
def test_one_sender_in_two_spellings_is_one(address: str | None, same_as: str | None) -> None:
    """And whoever has no address shares one bucket."""
    assert bucket_of(address) == bucket_of(same_as)


def test_many_addresses_fill_no_memory_and_the_rest_share_one_bucket(clock: Clock) -> None:
    """Those that are known keep theirs; the rest have one budget between them."""
    throttle = AuthThrottle("3/minute", max_addresses=100, clock=clock)
    failures(throttle, 2)

    told = [throttle.failed(f"10.0.{number // 250}.{number % 250}") for number in range(2000)]

    assert len(throttle) == 101
    assert told.count(None) == 99 + 3
    assert failures(throttle, 2)[0] is None


def test_old_addresses_make_room(clock: Clock) -> None:
    """After two windows without a failure nothing is known of one."""
    throttle = AuthThrottle("3/minute", max_addresses=100, clock=clock)
    for number in range(200):
        throttle.failed(f"10.0.0.{number}")

    clock.now += 120

    assert [throttle.failed("10.1.0.1"), len(throttle)] == [None, 1]


@pytest.mark.parametrize("limit", ["", "many", "30", "30/fortnight", "-1/minute"])
def test_a_limit_that_is_none_is_refused_at_start(limit: str) -> None:
    """The sentence names the setting."""
    with pytest.raises(StartError, match="TIERLANE_AUTH_FAILURES"):
        AuthThrottle(limit)
