"""The list of hosts that callbacks may go to: how it is read. Only the standard library, since settings use it."""

import re
from collections.abc import Callable
from functools import lru_cache

_ENTRY = re.compile(r"(\[[0-9a-f:.]+\]|(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?)(?::([0-9]{1,5}))?")


def split_entry(entry: str) -> tuple[str, int | None]:
    """Name and port of `name`, `*.name`, `name:port` or `[::1]:port`. Raises ValueError for what is none of them."""
    found = _ENTRY.fullmatch(entry.lower())
    if found is None or (found[2] and not 0 < int(found[2]) < 65536):
        raise ValueError(f"{entry!r} is not a host, *.host or host:port")
    return found[1].strip("[]"), int(found[2]) if found[2] else None


def host_list(text: str) -> tuple[str, ...]:
    """The entries of a list with commas. Raises ValueError."""
    entries = tuple(entry for part in text.split(",") if (entry := part.strip()))
    for entry in entries:
        split_entry(entry)
    return entries


class CallbackHosts:
    """Where each customer's callbacks may go. `own`: the list of a customer's row by its id, None where it has none of its
    own; `deployment`: the list of those.
    """

    def __init__(self, deployment: tuple[str, ...], own: Callable[[str], str | None] = lambda _: None) -> None:
        self._deployment = deployment
        self._own = own

    def of(self, customer_id: str) -> tuple[str, ...]:
        """The entries; none where callbacks are refused."""
        own = self._own(customer_id)
        return self._deployment if own is None else _known(own)


@lru_cache(1024)
def _known(text: str) -> tuple[str, ...]:
    """The entries of a customer's row. The table refuses what is no list; what came in all the same allows nothing."""
    try:
        return host_list(text)
    except ValueError:
        return ()
