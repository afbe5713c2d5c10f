"""Lists of hosts in settings: origins that may call the API (CORS), and hosts of callbacks.

Only the standard library is used, because settings parse their values with these functions.
"""

import re
from collections.abc import Callable
from functools import lru_cache

ANY = "*"
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?)(?::([0-9]{1,5}))?")


def origin_list(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of origins, as sent by browsers in `Origin`. Raises ValueError."""
    entries = tuple(entry for part in text.split(",") if (entry := part.strip()))
    if ANY in entries and len(entries) > 1:
        raise ValueError("* is every origin: remove the others")
    return tuple(entry if entry == ANY else _origin(entry) for entry in entries)


def _origin(entry: str) -> str:
    found = _ORIGIN.fullmatch(entry.lower())
    if found is None or (found[3] and not 0 < int(found[3]) < 65536):
        raise ValueError(f"{entry!r} is not an origin: scheme://host or scheme://host:port without a path, or * alone")
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS.get(scheme) else "")


def split_entry(entry: str) -> tuple[str, int | None]:
    """Name and port of `name`, `*.name`, `name:port` or `[::1]:port`. Raises ValueError for other texts."""
    found = _HOST.fullmatch(entry.lower())
    if found is None or (found[2] and not 0 < int(found[2]) < 65536):
        raise ValueError(f"{entry!r} is not a host, *.host or host:port")
    return found[1].strip("[]"), int(found[2]) if found[2] else None


def host_list(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of hosts. Raises ValueError."""
    entries = tuple(entry for part in text.split(",") if (entry := part.strip()))
    for entry in entries:
        split_entry(entry)
    return entries


class CallbackHosts:
    """The allowed hosts of each customer's callbacks. `own`: the list of a customer's row by its id, None if it has none;
    `deployment`: the list of such customers. `enabled`: whether callbacks can be signed; no host is allowed otherwise.
    """

    def __init__(
        self, deployment: tuple[str, ...], own: Callable[[str], str | None] = lambda _: None, *, enabled: bool
    ) -> None:
        self._deployment = deployment
        self._own = own
        self._enabled = enabled

    def of(self, customer_id: str) -> tuple[str, ...]:
        """The allowed hosts; none if callbacks are not allowed."""
        if not self._enabled:
            return ()
        own = self._own(customer_id)
        return self._deployment if own is None else _known(own)


@lru_cache(1024)
def _known(text: str) -> tuple[str, ...]:
    """Parse the list of a customer's row. The table rejects invalid lists; any that exists nevertheless allows no host."""
    try:
        return host_list(text)
    except ValueError:
        return ()
