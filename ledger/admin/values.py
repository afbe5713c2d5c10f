"""Durations, times and days in text, for the command line and the admin API. Each raises BadValue with the argument's name."""

import re
from datetime import UTC, date, datetime, timedelta

from ledger.admin.errors import BadValue

LONGEST = timedelta(days=36_500)
SPAN = "([1-9][0-9]{0,5})([smhdw])"
_SPAN = re.compile(SPAN)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
DAY = "20[0-9]{2}-[0-9]{2}-[0-9]{2}"
_DAY = re.compile(DAY)


def duration_of(name: str, text: str) -> timedelta:
    """A duration such as 24h or 30d."""
    form = _SPAN.fullmatch(text)
    if form is None:
        raise BadValue(f"{name}: must be a number and s, m, h, d or w, such as 24h or 30d, got {text!r}", name)
    length = timedelta(**{_UNITS[form[2]]: int(form[1])})
    if length > LONGEST:
        raise BadValue(f"{name}: must be at most {LONGEST.days}d, got {text!r}", name)
    return length


def time_of(name: str, text: str) -> datetime:
    """A time in ISO 8601 or as lists show it, in whole seconds; UTC unless it has an offset."""
    try:
        time = datetime.fromisoformat(text.removesuffix(" UTC")).replace(microsecond=0)
    except ValueError:
        raise BadValue(
            f"{name}: must be a time, such as 2026-11-01 or '2026-11-01 12:30:00' in UTC, got {text!r}", name
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def day_of(name: str, text: str) -> date:
    """A day of this century, as YYYY-MM-DD."""
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise BadValue(f"{name}: must be a day as YYYY-MM-DD, such as 2026-11-01, got {text!r}.", name)
