"""Values from the command line. Ranges are checked by the tables."""

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from ledger.admin.errors import in_sentence
from tierlane.admin.fields import REQUIRED, Field
from tierlane.admin.options import Given
from tierlane.connect import UsageError
from tierlane.settings.declaration import flag

_SPAN = re.compile(r"([1-9][0-9]{0,5})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LONGEST = timedelta(days=36_500)

# Numbers are shown with commas, so they are accepted with commas.
_KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "whole": ("a whole number", lambda text: int(text.replace(",", ""))),
    "decimal": ("a number", lambda text: float(text.replace(",", ""))),
    "switch": ("on or off", {"on": True, "off": False}.__getitem__),
    "text": ("a name", str),
    "names": ("names separated by commas", lambda text: list(dict.fromkeys(name.strip() for name in text.split(",")))),
}


def one_of(first_name: str, first: str | None, second_name: str, second: str | None) -> str | None:
    """The one of two values that was given. Raises UsageError if they differ."""
    if first is not None and second is not None and first != second:
        raise UsageError(f"Specify {first_name} or {second_name}, not both.")
    return second if first is None else first


def values_of(fields: Sequence[Field], given: Given) -> dict[str, Any]:
    """The given fields by column. Raises UsageError."""
    values: dict[str, Any] = {}
    for field in fields:
        text = given.get(field.name)
        if text is None:
            continue
        values[field.name] = value_of(field, text, flag(field.name))
    return values


def value_of(field: Field, text: str, called: str) -> Any:
    """The value of a field that users know as `called`. Raises UsageError."""
    must_be, parse = _KINDS[field.kind]
    try:
        return None if field.none and text == "none" else parse(text)
    except (ValueError, KeyError):
        must_be += " or none" if field.none else ""
        meaning = in_sentence(field.description)
        raise UsageError(f"{called}: must be {must_be}, got {text!r} ({meaning})") from None


def changes_of(fields: Sequence[Field], given: Given) -> dict[str, Any]:
    """The given fields of an existing row. Raises UsageError if there is none."""
    values = values_of(fields, given)
    if not values:
        raise UsageError(f"Specify at least one column: {_named(fields, 'or')}.")
    return values


def new_row(fields: Sequence[Field], given: Given) -> dict[str, Any]:
    """The given fields of a new row. Raises UsageError if a required one is missing."""
    missing = [field for field in fields if field.default == REQUIRED and given.get(field.name) is None]
    if missing:
        raise UsageError(f"Required: {_named(missing, 'and')}.")
    return values_of(fields, given)


def duration(option: str, text: str) -> timedelta:
    """A duration such as 24h or 30d. Raises UsageError."""
    form = _SPAN.fullmatch(text)
    if form is None:
        raise UsageError(f"{option}: must be a number and s, m, h, d or w, such as 24h or 30d, got {text!r}")
    length = timedelta(**{_UNITS[form[2]]: int(form[1])})
    if length > LONGEST:
        raise UsageError(f"{option}: must be at most {LONGEST.days}d, got {text!r}")
    return length


def _named(fields: Iterable[Field], joint: str) -> str:
    *names, last = [flag(field.name) for field in fields]
    return f"{', '.join(names)} {joint} {last}" if names else last
