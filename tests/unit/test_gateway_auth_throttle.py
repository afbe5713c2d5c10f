"""The limit of failed authentications: how many, for how long, and by which address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.client_address import client_address, networks_of
from gateway.auth.throttle import AuthThrottle, bucket_of
from scheduler.errors import StartError


class Setup:
    """A throttle whose clock starts at the beginning of a window of a minute."""

    def __init__(self, limit: str = "30/minute", **options: int) -> None:
        self.now = 6000.0
        self.throttle = AuthThrottle(limit, clock=lambda: self.now, **options)

    def fail(self, count: int, address: str = "192.0.2.1") -> list[int | None]:
        """The waits (ms) after so many failures; None where the failure is within the limit."""
        return [self.throttle.failed(address) for _ in range(count)]


def test_thirty_failures_a_minute_are_allowed() -> None:
    """Later failures get the time until the window ends, and are counted as rejected."""
    setup = Setup()
    setup.now += 15

    assert setup.fail(30) == [None] * 30
    assert setup.fail(5) == [45_001] * 5
    assert setup.throttle.rejected == 5


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(1, 12)), min_size=1, max_size=30), st.integers(1, 10))
def test_the_wait_is_sufficient_and_short(steps: list[tuple[float, int]], amount: int) -> None:
    """After the wait one failure is allowed again, a few milliseconds earlier none; it is under a minute."""
    setup = Setup(f"{amount}/minute")
    for pause, count in steps:
        setup.now += pause
        for _ in range(count):
            (wait_ms,) = setup.fail(1)
            if wait_ms is None:
                continue
            assert 0 < wait_ms <= 60_001
            began = setup.now
            setup.now = began + max(0, wait_ms - 3) / 1000
            assert setup.fail(1) != [None] or wait_ms <= 3
            setup.now = began + (wait_ms + 1) / 1000
            assert setup.fail(1) == [None]


def test_the_window_slides() -> None:
    """Thirty failures at the end of a minute leave one at the start of the next; rejected failures are not counted."""
    setup = Setup()
    setup.now += 59
    setup.fail(30)
    setup.now += 2
    assert setup.fail(30).count(None) == 1

    other = Setup()
    other.fail(1030)
    other.now += 60 + 30
    assert other.fail(16).count(None) == 15


def test_each_address_has_its_own_count() -> None:
    """Failures of one address do not affect another; an IPv6 network of 64 bits is one address."""
    setup = Setup("2/minute")
    setup.fail(10)
    waits = [setup.throttle.failed(f"2001:db8:1:2:{number:x}::1") for number in range(5)]

    assert setup.fail(2, "192.0.2.2") == [None, None]
    assert (waits[:2], None in waits[2:]) == ([None, None], False)
    assert setup.throttle.failed("2001:db8:1:3::1") is None


@pytest.mark.parametrize(
    ("address", "same_as"),
    [
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:0DB8:0:0:ffff::"),
        (None, ""),
        ("/run/gateway.sock:1", None),
    ],
)
def test_spellings_of_one_address_share_a_count(address: str | None, same_as: str | None) -> None:
    """Clients without an address share one count as well."""
    assert bucket_of(address) == bucket_of(same_as)


def test_the_number_of_addresses_is_bounded() -> None:
    """Known addresses keep their count, and the others share one; after two windows old addresses are dropped."""
    setup = Setup("3/minute", max_addresses=100)
    setup.fail(2)
    waits = [setup.throttle.failed(f"10.0.{number // 250}.{number % 250}") for number in range(2000)]

    assert len(setup.throttle) == 101
    assert waits.count(None) == 99 + 3
    assert setup.fail(1) == [None]
    setup.now += 120
    assert setup.throttle.failed("10.1.0.1") is None
    assert len(setup.throttle) == 1


@pytest.mark.parametrize("limit", ["", "many", "30", "30/fortnight", "-1/minute"])
def test_an_invalid_limit_is_rejected_at_start(limit: str) -> None:
    """The error names the setting."""
    with pytest.raises(StartError, match="TIERLANE_AUTH_FAILURES"):
        AuthThrottle(limit)


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", ["192.0.2.7"], "192.0.2.7"),
        ("10.0.0.1", ["203.0.113.9, 192.0.2.7", "10.0.0.2"], "192.0.2.7"),
        ("::ffff:10.0.0.1", ["2001:db8::1"], "2001:db8::1"),
        ("10.0.0.1", ["192.0.2.7:54321"], "192.0.2.7"),
        ("10.0.0.1", ["[2001:db8::1]:54321, 10.0.0.2:443"], "2001:db8::1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["not an address"], "10.0.0.1"),
        ("10.0.0.1", ["192.0.2.7, "], "10.0.0.1"),
        ("192.0.2.8", ["192.0.2.7"], "192.0.2.8"),
        ("", ["192.0.2.7"], ""),
        (None, ["192.0.2.7"], None),
    ],
)
def test_a_trusted_proxy_names_the_client(peer: str | None, forwarded: list[str], client: str | None) -> None:
    """What a client itself wrote into the header, before the entries of trusted proxies, has no effect."""
    assert client_address(peer, forwarded, networks_of("10.0.0.0/8")) == client


@pytest.mark.parametrize("text", ["10.0.0.0/33", "proxy.internal", "10.0.0.1/8"])
def test_networks_that_are_none_are_refused(text: str) -> None:
    """With a sentence that shows the form."""
    with pytest.raises(ValueError, match="must be networks such as"):
        networks_of(text)
