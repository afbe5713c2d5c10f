"""Where callbacks may go, how they are signed, and when they are tried again."""

import base64
import socket

import pytest

from gateway.host_lists import CallbackHosts, host_list, split_entry
from gateway.jobs.webhook_security import (
    checked_sockets,
    customer_key,
    is_public,
    secret_bytes,
    secret_text,
    signed,
)
from gateway.jobs.webhooks import DELAYS_S, MAX_CHARACTERS, PausedHosts, retry_after_s, url_problem

HOSTS = ("hooks.example.com", "*.example.org", "plain.example.net:8443", "[2001:db8::1]:8080", "xn--bcher-kva.example")


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com",
        "https://hooks.example.com/",
        "http://hooks.example.com/a/b?c=d&e=%20",
        "HTTPS://HOOKS.example.com/",
        "https://hooks.example.com:443/",
        "https://a.example.org/",
        "https://a.b.example.org/?q",
        "https://plain.example.net:8443/",
        "http://[2001:db8::1]:8080/",
        "https://hooks.example.com/@home",
        "https://xn--bcher-kva.example/",  # as it is in the list, and as it is looked up
    ],
)
def test_where_they_may_go(url: str) -> None:
    """A host of the list, on its own port or the scheme's."""
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
        "https://example.org/",  # the wildcard is for what is below it
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
        "https://hooks.example.com/" + "a" * MAX_CHARACTERS,
    ],
)
def test_where_they_may_not_go(url: str) -> None:
    """Anything else, and whatever two readers could read in two ways."""
    assert url_problem(url, HOSTS) is not None


def test_without_hosts_they_go_nowhere() -> None:
    """Off until an admin says otherwise."""
    assert url_problem("https://hooks.example.com/", ()) == "Callbacks are not enabled here."


@pytest.mark.parametrize(
    ("entry", "read"),
    [
        ("hooks.example.com", ("hooks.example.com", None)),
        ("Hooks.Example.com:8443", ("hooks.example.com", 8443)),
        ("*.example.org", ("*.example.org", None)),
        ("localhost", ("localhost", None)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_an_entry_of_the_list(entry: str, read: tuple[str, int | None]) -> None:
    """Name and port."""
    assert split_entry(entry) == read


@pytest.mark.parametrize("entry", ["https://a.example", "a.example/", "*", "a.*.example", "a:0", "a:65536", "-", "a b"])
def test_what_is_no_entry(entry: str) -> None:
    """It is said at start and not when the first callback is refused."""
    with pytest.raises(ValueError, match="is not a host"):
        host_list(f"good.example, {entry}")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),  # where clouds keep their credentials
        ("100.64.0.1", False),
        ("192.0.0.192", False),  # so does this one
        ("168.63.129.16", False),  # a cloud's host, seen from its machines
        ("192.88.99.1", False),
        ("fec0::2", False),
        ("3fff::1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),  # IPv4 addresses in the clothes of IPv6
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
        ("2001:0:1:2:3:4:80ff:fffe", False),
        ("nonsense", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    """Only the internet's."""
    assert is_public(address) is public


@pytest.mark.parametrize(
    ("address", "family"),
    [("10.0.0.1", socket.AF_INET), ("::ffff:127.0.0.1", socket.AF_INET6), ("::1", socket.AF_INET6)],
)
def test_an_address_is_judged_as_it_is_connected_to(address: str, family: socket.AddressFamily) -> None:
    """Whatever led to it; where any address is allowed it gets its socket."""
    place = (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 443))
    with pytest.raises(OSError, match="is not a public address"):
        checked_sockets(private=False)(place)
    with checked_sockets(private=True)(place) as made:
        assert made.family == family


def test_a_public_address_gets_its_socket() -> None:
    """It is not connected yet."""
    with checked_sockets(private=False)((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 443))) as made:
        assert made.family == socket.AF_INET


@pytest.mark.parametrize(
    "host",
    [
        *("127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "127.0.0.1.", "localhost."),
        *(
            "1.2.3.4.5",
            "a.0x7f",
            "a.1",
            "127.0.0.01",
            "[::1%25eth0]",
            "xn--a.example.org",
            "example.org.",
            "a..example.org",
        ),
    ],
)
def test_a_host_in_an_odd_form_is_refused_in_words(host: str) -> None:
    """Though the list would allow it: a resolver may take it for something else than it looks like."""
    hosts = (host.strip("[]").lower(), "*.example.org", "localhost", "*.1", "*.0x7f")

    assert "must be a DNS name without a dot at its end, or an IP address in its usual form" in (
        url_problem(f"http://{host}/", hosts, private=True) or ""
    )


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"],
)
def test_an_address_that_is_not_public_is_refused_in_words(host: str) -> None:
    """At once and not when it is called, though it is in the list; where any address is allowed it is taken."""
    hosts = (
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "[::1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
    )

    assert url_problem(f"http://{host}/", hosts) == "`callback_url` must not lead to an address that is not public."
    assert url_problem(f"http://{host}/", hosts, private=True) is None


def test_a_customer_has_its_own_hosts_or_the_deployments() -> None:
    """An empty list is one, too; one that cannot be read allows nothing."""
    own = {"listed": "a.example, *.b.example:8443", "none": "", "broken": "https://a.example/"}
    hosts = CallbackHosts(("hooks.example.com",), own.get)

    assert hosts.of("another") == ("hooks.example.com",)
    assert hosts.of("listed") == ("a.example", "*.b.example:8443")
    assert hosts.of("none") == hosts.of("broken") == ()


def test_each_customer_has_a_secret_of_its_own() -> None:
    """It depends on the deployment's and on the customer, and has the form that receivers expect."""
    keys = {customer_key(secret, name) for secret in (b"one", b"two") for name in ("a", "b")}

    assert len(keys) == 4
    assert all(secret_bytes(secret_text(key)) == key for key in keys)


def test_several_keys_sign_in_one_header() -> None:
    """Separated by spaces, as the specification has it for a secret that is replaced."""
    one, both = signed([b"1"], "m", 1, b""), signed([b"1", b"2"], "m", 1, b"")
    two = signed([b"2"], "m", 1, b"")

    assert both["webhook-signature"] == f"{one['webhook-signature']} {two['webhook-signature']}"


def test_the_signature_of_the_specification() -> None:
    """The example that implementations of Standard Webhooks share."""
    key = secret_bytes("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = signed([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')

    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize(
    "secret",
    ["", "whsec_", "whsec_!!", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_" + base64.b64encode(b"short").decode()],
)
def test_a_bad_secret_is_refused_and_not_repeated(secret: str) -> None:
    """With words for whoever set it."""
    with pytest.raises(ValueError, match="must be whsec_") as error:
        secret_bytes(secret)

    key = secret.removeprefix("whsec_")
    assert not key or key not in str(error.value)


@pytest.mark.parametrize(
    ("tries", "left_s", "status", "wait_s"),
    [
        (1, 600.0, 500, 1.0),
        (1, 600.0, None, 1.0),
        (1, 600.0, 302, 1.0),
        (4, 600.0, 503, 30.0),
        (len(DELAYS_S), 600.0, 500, 240.0),
        (len(DELAYS_S) + 1, 600.0, 500, None),  # often enough
        (5, 59.0, 500, None),  # the result is not kept for so long
        (1, 600.0, 410, None),  # gone for good
    ],
)
def test_when_it_is_tried_again(tries: int, left_s: float, status: int | None, wait_s: float | None) -> None:
    """Later and later, and not for ever."""
    assert retry_after_s(tries, left_s, status) == wait_s


def test_all_tries_fit_into_the_time_that_results_are_kept() -> None:
    """By default none is cut off by the end of the result."""
    assert sum(DELAYS_S) < 600


def test_a_host_that_does_not_answer_is_paused() -> None:
    """For longer with each failure in a row, called once in between, and as any other once it answers."""
    now = 0.0
    paused = PausedHosts(lambda: now)
    seen = []
    for _ in range(6):
        assert paused.paused() == []
        paused.failed("a")
        paused.failed("a")  # A call that was made together with the first.
        assert (paused.paused(), paused.max_calls("a"), paused.max_calls("b")) == (["a"], 1, 8)
        began = now
        while paused.paused():
            now += 0.5
        seen.append(now - began)
    paused.responded("a")

    assert seen == [1, 2, 5, 10, 30, 30]
    assert (paused.paused(), paused.max_calls("a")) == ([], 8)


def test_paused_hosts_are_bounded() -> None:
    """Those that failed first are forgotten."""
    paused = PausedHosts(lambda: 0.0)
    for number in range(1001):
        paused.failed(str(number))

    assert (len(paused.paused()), paused.max_calls("0"), paused.max_calls("1")) == (1000, 8, 1)
