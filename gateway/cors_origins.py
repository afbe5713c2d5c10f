"""The list of origins whose pages may call the API: how an entry is read. Only the standard library, since settings use it."""

import re

ANY = "*"
_ENTRY = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def origin_list(text: str) -> tuple[str, ...]:
    """The entries of a list with commas, as browsers send them in `Origin`. Raises ValueError."""
    entries = tuple(entry for part in text.split(",") if (entry := part.strip()))
    if ANY in entries and len(entries) > 1:
        raise ValueError("* is every origin: leave the others out")
    return tuple(entry if entry == ANY else _origin(entry) for entry in entries)


def _origin(entry: str) -> str:
    found = _ENTRY.fullmatch(entry.lower())
    if found is None or (found[3] and not 0 < int(found[3]) < 65536):
        raise ValueError(f"{entry!r} is not an origin: scheme://host or scheme://host:port without a path, or * alone")
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS.get(scheme) else "")
