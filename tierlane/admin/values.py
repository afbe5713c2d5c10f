"""What was given on the command line, as values of columns. Ranges are left to the tables, whose CHECKs know them."""

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from tierlane.admin.options import REQUIRED, Field, Given
from tierlane.connect import UsageError
from tierlane.settings.declaration import flag

_SPAN = re.compile(r"([1-9][0-9]{0,5})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LONGEST = timedelta(days=36_500)


def values_of(fields: Sequence[Field], given: Given) -> dict[str, Any]:
    """The fields that were given, by column. Raises UsageError."""
    return {field.name: _value(field, text) for field in fields for text in [given.get(field.name)] if text is not None}


def changes_of(fields: Sequence[Field], given: Given) -> dict[str, Any]:
    """As `values_of`, for a row that is there. Raises UsageError where nothing is to be changed."""
    values = values_of(fields, given)
    if not values:
        raise UsageError(f"Say what to set: {_named(fields, 'or')}.")
    return values


def new_row(fields: Sequence[Field], given: Given) -> dict[str, Any]:
    """As `values_of`, for a new row. Raises UsageError where a field is missing that it cannot go without."""
    missing = [field for field in fields if field.default == REQUIRED and given.get(field.name) is None]
    if missing:
        raise UsageError(f"A new one needs {_named(missing, 'and')}, too.")
    return values_of(fields, given)


def span(option: str, text: str) -> timedelta:
    """A time such as 24h or 30d. Raises UsageError."""
    form = _SPAN.fullmatch(text)
    if form is None:
        raise UsageError(f"{option}: must be a number and s, m, h, d or w, such as 24h or 30d, got {text!r}")
    length = timedelta(**{_UNITS[form[2]]: int(form[1])})
    if length > LONGEST:
        raise UsageError(f"{option}: must be at most {LONGEST.days}d, got {text!r}")
    return length


def _value(field: Field, text: str) -> Any:
    if field.none and text == "none":
        return None
    must_be, parse = _KINDS[field.kind]
    try:
        return parse(text)
    except (ValueError, KeyError):
        must_be += " or none" if field.none else ""
        meaning = field.says[:1].lower() + field.says[1:].rstrip(".")
        raise UsageError(f"{flag(field.name)}: must be {must_be}, got {text!r} ({meaning})") from None


def _whole(text: str) -> int:
    return int(text.replace(",", ""))  # Numbers are shown with commas, so they are taken with them.


def _decimal(text: str) -> float:
    return float(text.replace(",", ""))


_KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "whole": ("a whole number", _whole),
    "decimal": ("a number", _decimal),
    "switch": ("on or off", {"on": True, "off": False}.__getitem__),
    "text": ("a name", str),
}


def _named(fields: Iterable[Field], joint: str) -> str:
    *names, last = [flag(field.name) for field in fields]
    return f"{', '.join(names)} {joint} {last}" if names else last
