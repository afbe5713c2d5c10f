"""Callbacks of jobs: allowed hosts and addresses, signatures, retries, and pauses of hosts that do not respond."""

import base64
import socket
from datetime import UTC, datetime, timedelta

import pytest

from gateway.host_lists import CallbackHosts, host_list, split_entry
from gateway.jobs.callback_url import MAX_URL_CHARACTERS, url_problem
from gateway.jobs.paused_hosts import PausedHosts
from gateway.jobs.webhook_security import (
    checked_sockets,
    customer_key,
    is_public,
    secret_bytes,
    secret_text,
    signed,
)
from gateway.jobs.webhooks import DELAYS_S, retry_after_s
from ledger.catalog.webhook_secret import TooManySecrets, WebhookSecrets

NOW = datetime(2026, 11, 1, tzinfo=UTC)
HOSTS = ("hooks.example.com", "*.example.org", "plain.example.net:8443", "[2001:db8::1]:8080", "xn--bcher-kva.example")


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com",
        "http://hooks.example.com/a/b?c=d&e=%20",
        "HTTPS://HOOKS.example.com/",
        "https://hooks.example.com:443/",
        "https://a.example.org/",
        "https://a.b.example.org/?q",
        "https://plain.example.net:8443/",
        "http://[2001:db8::1]:8080/",
        "https://hooks.example.com/@home",
        "https://xn--bcher-kva.example/",  # in the form of the list and of the resolver
    ],
)
def test_allowed_urls(url: str) -> None:
    """A host of the list, on the port in the list or that of the scheme."""
    assert url_problem(url, HOSTS, private=True) is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example.com",
        "//hooks.example.com/",
        "ftp://hooks.example.com/",
        "file:///etc/passwd",
        "https://user@hooks.example.com/",
        "https://user:secret@hooks.example.com/",
        "https://hooks.example.com@evil.example/",
        "https://evil.example\\@hooks.example.com/",
        "https://evil.example#@hooks.example.com/",
        "https://hooks.example.com#fragment",
        "https://hooks.example.com.evil.example/",
        "https://evil-hooks.example.com/",
        "https://example.org/",  # the wildcard matches subdomains only
        "https://.example.org/",
        "https://hooks.example.com:8443/",
        "https://plain.example.net/",
        "https://hooks.example.com:99999/",
        "https://hooks.example.com /",
        "https://hooks.example.com/\n",
        "https://höoks.example.com/",
        "https://hooks.example.com./",
        "https://127.0.0.1%2f.example.org/",
        "https://evil%00.example.org/",
        "https://evil.com;.example.org/",
        "https://*.example.org/",
        "https://a..example.org/",
        "https://..example.org/",
        "https://" + "a" * 64 + ".example.org/",
        "https://" + "a." * 130 + "example.org/",
        "http://127.0.0.1/",
        "https://hooks.example.com/" + "a" * MAX_URL_CHARACTERS,
    ],
)
def test_rejected_urls(url: str) -> None:
    """Any other host, and any URL that two parsers could read differently; without hosts, all."""
    assert url_problem(url, HOSTS) is not None
    assert url_problem("https://hooks.example.com/", ()) is not None


@pytest.mark.parametrize(
    "host",
    [
        *("127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "127.0.0.1.", "localhost."),
        *("1.2.3.4.5", "a.0x7f", "a.1", "127.0.0.01", "[::1%25eth0]", "xn--a.example.org", "example.org."),
        "a..example.org",
    ],
)
def test_a_host_in_an_unusual_form_is_rejected(host: str) -> None:
    """Although the list would allow it: a resolver may take it for another address."""
    hosts = (host.strip("[]").lower(), "*.example.org", "localhost", "*.1", "*.0x7f")

    assert "or an IP address in its usual form" in (url_problem(f"http://{host}/", hosts, private=True) or "")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"],
)
def test_an_address_that_is_not_public_is_rejected_at_submission(host: str) -> None:
    """Although it is in the list, unless private addresses are allowed."""
    hosts = (
        "[::ffff:7f00:1]",
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "[::1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
    )

    assert "not public" in (url_problem(f"http://{host}/", hosts) or "")
    assert url_problem(f"http://{host}/", hosts, private=True) is None


@pytest.mark.parametrize(
    ("entry", "host", "port"),
    [
        ("hooks.example.com", "hooks.example.com", None),
        ("Hooks.Example.com:8443", "hooks.example.com", 8443),
        ("*.example.org", "*.example.org", None),
        ("localhost", "localhost", None),
        ("[::1]:80", "::1", 80),
    ],
)
def test_an_entry_of_the_list(entry: str, host: str, port: int | None) -> None:
    """Name and port."""
    assert split_entry(entry) == (host, port)


@pytest.mark.parametrize("entry", ["https://a.example", "a.example/", "*", "a.*.example", "a:0", "a:65536", "-", "a b"])
def test_a_bad_entry_is_an_error_at_start(entry: str) -> None:
    """Not only when the first callback is rejected."""
    with pytest.raises(ValueError, match="is not a host"):
        host_list(f"good.example, {entry}")


def test_a_customer_has_its_own_hosts_or_those_of_the_deployment() -> None:
    """An empty list allows nothing, as does one that cannot be read."""
    own = {"listed": "a.example, *.b.example:8443", "none": "", "broken": "https://a.example/"}
    hosts = CallbackHosts(("hooks.example.com",), own.get, enabled=True)

    assert hosts.of("another") == ("hooks.example.com",)
    assert hosts.of("listed") == ("a.example", "*.b.example:8443")
    assert hosts.of("none") == hosts.of("broken") == ()


def test_without_a_secret_nothing_is_allowed_or_signed() -> None:
    """A key that is derived from an empty secret could be derived by anybody who knows the id of a customer."""
    hosts = CallbackHosts(("hooks.example.com",), {"listed": "a.example"}.get, enabled=False)

    assert hosts.of("listed") == hosts.of("another") == ()
    with pytest.raises(ValueError, match="TIERLANE_CALLBACK_SECRET"):
        customer_key(b"", "listed")


def test_secrets_have_a_key_each() -> None:
    """The first is that of versions without a number."""
    keys = [customer_key(b"deployment", customer, number) for customer in ("a", "b") for number in (1, 2, 3)]

    assert len(set(keys)) == 6
    assert keys[0] == customer_key(b"deployment", "a")
    assert keys[0].hex() == "0b4cafe942c04c0adb0cc1f4fec6a1bb173e2ed3f204422d0139dc24838ae66a"


def test_valid_secrets_of_rotations() -> None:
    """All that are valid at a rotation stay so for its grace time, at most five; afterwards only the newest is."""
    grace = timedelta(hours=2)
    first = WebhookSecrets(1, None, None)
    second = first.rotated(grace, NOW)
    third = second.rotated(timedelta(hours=3), NOW + timedelta(hours=1))

    assert (second.valid(NOW), second.valid(NOW + grace)) == (range(2, 0, -1), range(2, 1, -1))
    assert third == WebhookSecrets(3, 1, NOW + timedelta(hours=4))
    assert second.rotated(grace, NOW + grace) == WebhookSecrets(3, 2, NOW + 2 * grace)
    assert (third.current(NOW), third.current(NOW + timedelta(hours=4))) == (third, WebhookSecrets(3, None, None))
    fifth = third.rotated(grace, NOW).rotated(grace, NOW)
    with pytest.raises(TooManySecrets, match="5 webhook secrets are valid: the next rotation is possible at 2026-"):
        fifth.rotated(grace, NOW)
    assert fifth.webhook_secret_until == NOW + grace
    assert fifth.rotated(grace, NOW + grace).webhook_secret == 6


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::808:808", True),
        *[(address, False) for address in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1")],
        *[(address, False) for address in ("0.0.0.0", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.88.99.1")],
        # Addresses of clouds with credentials or of the host.
        *[(address, False) for address in ("169.254.169.254", "192.0.0.192", "168.63.129.16")],
        *[(address, False) for address in ("::1", "::", "fe80::1%eth0", "fec0::2", "fd00::1", "ff02::1", "3fff::1")],
        # IPv4 addresses in IPv6.
        *[(address, False) for address in ("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::")],
        ("2001:0:1:2:3:4:80ff:fffe", False),
        ("nonsense", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    """Only those of the internet."""
    assert is_public(address) is public


@pytest.mark.parametrize(
    ("address", "family"),
    [("10.0.0.1", socket.AF_INET), ("::ffff:127.0.0.1", socket.AF_INET6), ("::1", socket.AF_INET6)],
)
def test_an_address_is_checked_when_its_socket_is_made(address: str, family: socket.AddressFamily) -> None:
    """After name resolution and for each redirect; a public address gets its socket."""
    info = (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 443))
    with pytest.raises(OSError, match="is not a public address"):
        checked_sockets(private=False)(info)
    with checked_sockets(private=True)(info) as made:
        assert made.family == family
    with checked_sockets(private=False)((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 443))) as made:
        assert made.family == socket.AF_INET


def test_each_customer_has_a_secret_of_its_own() -> None:
    """It depends on the secret of the deployment and on the customer, and has the form that receivers expect."""
    keys = {customer_key(secret, name) for secret in (b"one", b"two") for name in ("a", "b")}

    assert len(keys) == 4
    assert all(secret_bytes(secret_text(key)) == key for key in keys)


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The example of the specification; several keys sign in one header, separated by spaces."""
    key = secret_bytes("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    message = ("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    signature = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="

    assert signed([key], *message) == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": signature,
    }
    other = signed([b"2"], *message)["webhook-signature"]
    assert signed([key, b"2"], *message)["webhook-signature"] == f"{signature} {other}"


@pytest.mark.parametrize(
    "secret",
    ["", "whsec_", "whsec_!!", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_" + base64.b64encode(b"short").decode()],
)
def test_a_bad_secret_is_not_in_the_message(secret: str) -> None:
    """The message has the form that is expected."""
    with pytest.raises(ValueError, match="must be whsec_") as error:
        secret_bytes(secret)

    key = secret.removeprefix("whsec_")
    assert not key or key not in str(error.value)


@pytest.mark.parametrize("count", [24, 64])
def test_zeros_are_no_secret(count: int) -> None:
    """HMAC signs with them as with an empty key, so anybody can."""
    with pytest.raises(ValueError, match="zeros are an empty key"):
        secret_bytes(secret_text(bytes(count)))


@pytest.mark.parametrize(
    ("tries", "left_s", "status", "wait_s"),
    [
        (1, 600.0, 500, 1.0),
        (1, 600.0, None, 1.0),
        (1, 600.0, 302, 1.0),
        (4, 600.0, 503, 30.0),
        (len(DELAYS_S), 600.0, 500, 240.0),
        (len(DELAYS_S) + 1, 600.0, 500, None),  # the last try
        (5, 59.0, 500, None),  # the result expires before
        (1, 600.0, 410, None),  # gone
    ],
)
def test_delays_between_tries(tries: int, left_s: float, status: int | None, wait_s: float | None) -> None:
    """They grow, and all tries fit into the time that results are kept by default."""
    assert retry_after_s(tries, left_s, status) == wait_s
    assert sum(DELAYS_S) < 600


def test_a_host_that_does_not_respond_is_paused() -> None:
    """Longer after each failure in a row, with one call in between; normally again after a response."""
    now, durations = 0.0, []
    paused = PausedHosts(lambda: now)
    for _ in range(6):
        assert paused.paused() == []
        paused.failed("a")
        paused.failed("a")  # A call that was made at the same time.
        assert (paused.paused(), paused.max_calls("a"), paused.max_calls("b")) == (["a"], 1, 8)
        began = now
        while paused.paused():
            now += 0.5
        durations.append(now - began)
    paused.responded("a")

    assert durations == [1, 2, 5, 10, 30, 30]
    assert (paused.paused(), paused.max_calls("a")) == ([], 8)


def test_the_number_of_paused_hosts_is_bounded() -> None:
    """The oldest failures are dropped."""
    paused = PausedHosts(lambda: 0.0)
    for number in range(1001):
        paused.failed(str(number))

    assert (len(paused.paused()), paused.max_calls("0"), paused.max_calls("1")) == (1000, 8, 1)
