"""Which URLs callbacks may go to. Pure: by the URL's own words; where its name leads is looked at when it is called.

It is parsed by the same library that will call it, so that no two readers can see two hosts in it.
"""

import ipaddress
import re
from collections.abc import Sequence

from yarl import URL

from gateway.host_lists import split_entry
from gateway.jobs_addresses import is_public

MAX_CHARACTERS = 2048
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z)(?:{_LABEL}\.)*{_LABEL}")
"""A name that DNS can hold: no %2f that a resolver may take for what it stands for, and no dot at its end."""

_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
"""What a resolver may take for an IPv4 address, however it is written: 127.1, 2130706433, 0x7f.1, 0177.0.0.1."""


def refused(url: str, hosts: Sequence[str], *, private: bool = False) -> str | None:
    """Why callbacks do not go to `url`, in words for the client; None where they may. `private`: to any address."""
    if not hosts:
        return "Callbacks are not enabled here."
    if len(url) > MAX_CHARACTERS:
        return f"`callback_url` must not be longer than {MAX_CHARACTERS} characters."
    parsed = _parsed(url)
    if parsed is None:
        return "`callback_url` must be an http or https URL in ASCII, without user, password and fragment."
    return _host_refused(parsed, hosts, private=private)


def _host_refused(parsed: URL, hosts: Sequence[str], *, private: bool) -> str | None:
    host = (parsed.raw_host or "").lower()
    if not _is_address(host) and (_NUMBER.fullmatch(host) or not _is_name(parsed, host)):
        return (
            "The host of `callback_url` must be a DNS name without a dot at its end, or an IP address in its usual form, "
            "such as 192.0.2.1 or [2001:db8::1]."
        )
    if not any(_allows(entry, host, parsed) for entry in hosts):
        return "The host of `callback_url` is not one of those that callbacks may go to."
    if _is_address(host) and not private and not is_public(host):
        return "`callback_url` must not lead to an address that is not public."
    return None


def _parsed(url: str) -> URL | None:
    """None for what is no plain URL: nothing in it that one reader could take for something else than another does."""
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
        return bool(url.host)  # Which decodes what is written in Punycode.
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host  # No zone: it means something on one machine alone.


def _allows(entry: str, host: str, url: URL) -> bool:
    name, port = split_entry(entry)
    right_port = url.is_default_port() if port is None else url.port == port
    if name.startswith("*."):
        return right_port and host.endswith(name[1:]) and len(host) > len(name) - 1
    return right_port and host == name
