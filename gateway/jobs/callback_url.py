"""The check of a callback URL: its form, the customer's list of hosts, and its address.

URLs are parsed by the library that connects to them, so that two parsers cannot find different hosts.
"""

import ipaddress
import re
from collections.abc import Iterator, Sequence

from yarl import URL

from gateway.host_lists import split_entry
from gateway.jobs.webhook_security import is_public

MAX_URL_CHARACTERS = 2048
NOT_ALLOWED = "The host of `callback_url` is not one of those that callbacks may go to."
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z)(?:{_LABEL}\.)*{_LABEL}")
"""A DNS name, without escapes such as %2f that a resolver may decode, and without a dot at its end."""

_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
"""Names that a resolver may accept as an IPv4 address: 127.1, 2130706433, 0x7f.1, 0177.0.0.1."""


def url_problem(url: str, hosts: Sequence[str], *, private: bool = False) -> str | None:
    """Why callbacks to `url` are rejected, as a sentence for the client; None if they are allowed.

    `private`: addresses that are not public are allowed.
    """
    if not hosts:
        return (
            "Callbacks are not enabled here: leave `callback_url` out, and read the result at GET /v1/result/{task_id}."
        )
    return next(_problems(url, hosts, private=private), None)


def alert_url_problem(url: str, hosts: Sequence[str], *, private: bool = False) -> str | None:
    """All reasons why alerts are not sent to `url`, as sentences for operators; None if they are."""
    reasons = list(_problems(url, hosts, private=private))
    if not hosts and NOT_ALLOWED in reasons:
        without = "There are no callback hosts for `alert_url`: `tierlane customer set NAME --callback-hosts HOST`."
        reasons[reasons.index(NOT_ALLOWED)] = without
    return " ".join(reasons).replace("callback_url", "alert_url") or None


def _problems(url: str, hosts: Sequence[str], *, private: bool) -> Iterator[str]:
    """Why callbacks to `url` are rejected; of a URL without a valid form the first reason."""
    if len(url) > MAX_URL_CHARACTERS:
        yield f"`callback_url` must not be longer than {MAX_URL_CHARACTERS} characters."
        return
    parsed = _parse(url)
    if parsed is None:
        yield "`callback_url` must be an http or https URL in ASCII, without user, password and fragment."
        return
    host = (parsed.raw_host or "").lower()
    if not _is_address(host) and (_NUMBER.fullmatch(host) or not _is_name(parsed, host)):
        yield (
            "The host of `callback_url` must be a DNS name without a dot at its end, or an IP address in its usual form, "
            "such as 192.0.2.1 or [2001:db8::1]."
        )
        return
    if not any(_allows(entry, host, parsed) for entry in hosts):
        yield NOT_ALLOWED
    if _is_address(host) and not private and not is_public(host):
        yield "`callback_url` must not lead to an address that is not public."


def private_hosts(hosts: Sequence[str]) -> list[str]:
    """The entries of a list of callback hosts that are addresses which are not public, or `localhost`."""
    names = [(entry, split_entry(entry)[0]) for entry in hosts]
    return [entry for entry, name in names if name == "localhost" or (_is_address(name) and not is_public(name))]


def is_webhook_url(url: str) -> bool:
    """Whether a URL has the form of those of receivers."""
    return len(url) <= MAX_URL_CHARACTERS and _parse(url) is not None


def _parse(url: str) -> URL | None:
    """None for a URL with a part that different parsers may read differently."""
    if not (url.isascii() and url.isprintable()) or any(character in url for character in ' "#<>\\^`{|}'):
        return None
    try:
        parsed = URL(url)
        plain = parsed.scheme in ("http", "https") and "@" not in parsed.raw_authority and bool(parsed.raw_host)
    except ValueError:
        return None
    return parsed if plain else None


def _is_name(url: URL, host: str) -> bool:
    if _NAME.fullmatch(host) is None:
        return False
    try:
        return bool(url.host)  # Decodes Punycode.
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host  # A zone has a meaning on one machine only.


def _allows(entry: str, host: str, url: URL) -> bool:
    name, port = split_entry(entry)
    right_port = url.is_default_port() if port is None else url.port == port
    if name.startswith("*."):
        return right_port and host.endswith(name[1:]) and len(host) > len(name) - 1
    return right_port and host == name
