"""Values from the command line. Ranges are checked by the tables."""

from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, timedelta
from typing import Any, TypeVar

from ledger.admin.errors import BadValue, in_sentence
from ledger.admin.values import day_of, duration_of, time_of
from tierlane.admin.fields import REQUIRED, Field
from tierlane.admin.options import Given
from tierlane.connect import UsageError
from tierlane.settings.declaration import flag

T = TypeVar("T")

# Numbers are shown with commas, so they are accepted with commas.
_KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "whole": ("a whole number", lambda text: int(text.replace(",", ""))),
    "decimal": ("a number", lambda text: float(text.replace(",", ""))),
    "switch": ("on or off", {"on": True, "off": False}.__getitem__),
    "text": ("a name", str),
    "shares": ("numbers separated by commas, such as 0.8,1", lambda text: [] if text == "off" else _shares(text)),
    "names": ("names separated by commas", lambda text: list(dict.fromkeys(name.strip() for name in text.split(",")))),
}


def _shares(text: str) -> list[float]:
    return sorted({float(share) for share in text.split(",")})


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
        must_be += " or none" if field.none and field.kind != "shares" else ""  # Its meaning has all words.
        meaning = in_sentence(field.meaning)
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
    return _read(duration_of, option, text)


def time(option: str, text: str) -> datetime:
    """A time in ISO 8601 or as lists show it; UTC unless it has an offset. Raises UsageError."""
    return _read(time_of, option, text)


def day(option: str, text: str) -> date:
    """A day as YYYY-MM-DD. Raises UsageError."""
    return _read(day_of, option, text)


def _read(parse: Callable[[str, str], T], option: str, text: str) -> T:
    try:
        return parse(option, text)
    except BadValue as error:
        raise UsageError(str(error)) from None


def _named(fields: Iterable[Field], joint: str) -> str:
    *names, last = [flag(field.name) for field in fields]
    return f"{', '.join(names)} {joint} {last}" if names else last
