"""The calendar of quotas: which period holds an instant, when it begins and ends, in the time zone of the customer. Pure.

Periods are counted from 1970 on the clock and calendar of the zone, so a number is that of a date there: a day has 23 to 25
hours where clocks change. Weeks begin on Monday; months and years are those of the calendar. Seconds, minutes and hours are
those of UTC in every zone. Lua counts in the same way (ratelimit/lua/quota.lua), from the offsets of the zone.
"""

from datetime import MAXYEAR, UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from ratelimit.quotas import PERIOD_S, period_of, period_parts

Offsets = tuple[int, ...]
"""Offsets of a zone from UTC in seconds, and between two of them the instant of the change, in seconds since the epoch."""

HALF_YEAR_S = 183 * 86_400
_STEP_S = 7 * 86_400  # No zone changes its clocks twice in a week.

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - on the clock of the zone
_MONDAY = datetime(1969, 12, 29)  # noqa: DTZ001 - the week of the epoch, a Thursday, begins here
_MONTHS = {"month": 1, "year": 12}
_IN_ZONE = frozenset({"day", "week", "month", "year"})


@lru_cache(maxsize=1024)
def zone_of(name: str) -> ZoneInfo:
    """The zone of an IANA name. Raises ValueError with a sentence for an unknown one."""
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):  # An unknown key, or the name of a folder.
        raise ValueError(f"{name!r} is not a time zone of the IANA database, such as Europe/Amsterdam") from None


def window_number(name: str, now: datetime, zone: str = "") -> int:
    """Which period of a quota holds `now`, counted from 1970. `zone`: IANA name, "" for UTC. Raises KeyError for an unknown unit."""
    every, unit = period_parts(period_of(name))
    local = now.astimezone(_zone(unit, zone)).replace(tzinfo=None)
    if unit in _MONTHS:
        return ((local.year - 1970) * 12 + local.month - 1) // (every * _MONTHS[unit])
    return (local - _origin(unit)) // timedelta(seconds=every * PERIOD_S[unit])


def window_start(name: str, number: int, zone: str = "") -> datetime:
    """When a period begins, in UTC: the first instant with this date where clocks skip or repeat it. Raises KeyError as above."""
    every, unit = period_parts(period_of(name))
    if unit in _MONTHS:
        years, month = divmod(number * every * _MONTHS[unit], 12)
        local = _EPOCH.replace(year=min(1970 + years, MAXYEAR), month=month + 1)
    else:
        local = _origin(unit) + number * timedelta(seconds=every * PERIOD_S[unit])
    return local.replace(tzinfo=_zone(unit, zone)).astimezone(UTC)


def window_ending(name: str, end: datetime, zone: str = "") -> int:
    """The period that ends at about `end`; an error of less than half a period does not matter."""
    every, unit = period_parts(period_of(name))
    return window_number(name, end - timedelta(seconds=every * PERIOD_S[unit] / 2), zone)


@lru_cache(maxsize=1024)
def offsets_near(zone: str, half_year: int) -> Offsets:
    """The offsets from half a year before the `half_year`-th one since 1970 to two years after it."""
    found, start = zone_of(zone), (half_year - 1) * HALF_YEAR_S
    offsets = [_offset(found, start)]
    for end in range(start + _STEP_S, (half_year + 5) * HALF_YEAR_S, _STEP_S):
        before, after = offsets[-1], _offset(found, end)
        if before != after:
            low, high = end - _STEP_S, end
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if _offset(found, middle) == before else (low, middle)
            offsets += [high, after]
    return tuple(offsets)


def _offset(zone: ZoneInfo, at_s: int) -> int:
    offset = datetime.fromtimestamp(at_s, zone).utcoffset() or timedelta()
    return int(offset.total_seconds())


def _zone(unit: str, zone: str) -> ZoneInfo:
    return zone_of(zone if zone and unit in _IN_ZONE else "UTC")


def _origin(unit: str) -> datetime:
    return _MONDAY if unit == "week" else _EPOCH
