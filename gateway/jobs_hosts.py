"""The list of hosts that callbacks may go to: how an entry is read. Only the standard library, since settings use it."""

import re

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
