"""Which URLs callbacks may go to. Pure: by the URL's own words; where its name leads is looked at when it is called.

It is parsed by the same library that will call it, so that no two readers can see two hosts in it.
"""

import re
from collections.abc import Sequence

from yarl import URL

from gateway.jobs_hosts import split_entry

MAX_CHARACTERS = 2048
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z)(?:{_LABEL}\.)*{_LABEL}|[0-9a-f.]*:[0-9a-f:.]*")
"""A name that DNS can hold, or an IPv6 address without a zone: no %2f that a resolver may take for what it stands for."""


def refused(url: str, hosts: Sequence[str]) -> str | None:
    """Why callbacks do not go to `url`, in words for the client; None where they may."""
    if not hosts:
        return "Callbacks are not enabled here."
    if len(url) > MAX_CHARACTERS:
        return f"`callback_url` must not be longer than {MAX_CHARACTERS} characters."
    parsed = _parsed(url)
    if parsed is None or parsed.raw_host is None:
        return "`callback_url` must be an http or https URL in ASCII, without user, password and fragment."
    if not any(_allows(entry, parsed.raw_host.lower(), parsed) for entry in hosts):
        return "The host of `callback_url` is not one of those that callbacks may go to."
    return None


def _parsed(url: str) -> URL | None:
    """None for what is no plain URL: nothing in it that one reader could take for something else than another does."""
    if not (url.isascii() and url.isprintable()) or any(character in url for character in ' "#<>\\^`{|}'):
        return None
    try:
        parsed = URL(url)
        plain = parsed.scheme in ("http", "https") and "@" not in parsed.raw_authority
        plain = plain and _HOST.fullmatch((parsed.raw_host or "").lower()) is not None
    except ValueError:
        return None
    return parsed if plain else None


def _allows(entry: str, host: str, url: URL) -> bool:
    name, port = split_entry(entry)
    right_port = url.is_default_port() if port is None else url.port == port
    if name.startswith("*."):
        return right_port and host.endswith(name[1:]) and len(host) > len(name) - 1
    return right_port and host == name
