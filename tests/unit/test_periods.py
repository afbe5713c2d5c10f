"""The calendar of quotas in time zones: a table of instants, zones and periods, and properties for any of them."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit.periods import HALF_YEAR_S, offsets_near, window_ending, window_number, window_start, zone_of

ZONES = (
    "",
    "Europe/Amsterdam",
    "America/New_York",
    "Africa/Cairo",
    "America/Havana",
    "Pacific/Kiritimati",
    "Asia/Kolkata",
)
CALENDAR = ("1day", "2day", "1week", "1month", "3month", "1year", "1day:usd")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("zone", "period", "now", "starts", "ends", "hours"),
    [
        # Clocks go forward: a day of 23 hours, and a week and a month that are an hour shorter.
        ("Europe/Amsterdam", "1day", "2027-03-28T12:00", "2027-03-27T23:00", "2027-03-28T22:00", 23),
        ("Europe/Amsterdam", "1day", "2027-03-28T22:00", "2027-03-28T22:00", "2027-03-29T22:00", 24),
        ("Europe/Amsterdam", "1week", "2027-03-24T00:00", "2027-03-21T23:00", "2027-03-28T22:00", 167),
        ("Europe/Amsterdam", "1month", "2027-03-28T12:00", "2027-02-28T23:00", "2027-03-31T22:00", 31 * 24 - 1),
        ("America/New_York", "1day", "2027-03-14T12:00", "2027-03-14T05:00", "2027-03-15T04:00", 23),
        ("America/New_York", "1month", "2027-03-01T05:00", "2027-03-01T05:00", "2027-04-01T04:00", 31 * 24 - 1),
        # Clocks go back: 25 hours.
        ("Europe/Amsterdam", "1day", "2027-10-31T00:59", "2027-10-30T22:00", "2027-10-31T23:00", 25),
        ("Europe/Amsterdam", "1day", "2027-10-31T22:59:59.999", "2027-10-30T22:00", "2027-10-31T23:00", 25),
        ("America/New_York", "1day", "2027-11-07T06:30", "2027-11-07T04:00", "2027-11-08T05:00", 25),
        ("America/New_York", "1week", "2027-11-07T06:30", "2027-11-01T04:00", "2027-11-08T05:00", 169),
        ("America/New_York", "1month", "2027-11-30T06:30", "2027-11-01T04:00", "2027-12-01T05:00", 30 * 24 + 1),
        # The end of February in a common and in a leap year.
        ("Europe/Amsterdam", "1month", "2027-02-28T22:59", "2027-01-31T23:00", "2027-02-28T23:00", 28 * 24),
        ("Europe/Amsterdam", "1month", "2028-02-28T23:30", "2028-01-31T23:00", "2028-02-29T23:00", 29 * 24),
        ("Europe/Amsterdam", "1day", "2028-02-29T12:00", "2028-02-28T23:00", "2028-02-29T23:00", 24),
        ("America/New_York", "1month", "2028-03-01T04:59", "2028-02-01T05:00", "2028-03-01T05:00", 29 * 24),
        ("America/New_York", "1month", "2027-03-01T04:59", "2027-02-01T05:00", "2027-03-01T05:00", 28 * 24),
        ("", "1month", "2027-02-28T23:59", "2027-02-01T00:00", "2027-03-01T00:00", 28 * 24),
        ("", "1month", "2028-02-29T23:59", "2028-02-01T00:00", "2028-03-01T00:00", 29 * 24),
        # A year, and several days, of the zone's calendar.
        ("America/New_York", "1year", "2027-01-01T04:59", "2026-01-01T05:00", "2027-01-01T05:00", 365 * 24),
        ("Europe/Amsterdam", "2day", "2027-03-28T12:00", "2027-03-26T23:00", "2027-03-28T22:00", 47),
        # Clocks that change at midnight: a day begins at 01:00, or at the first of two midnights.
        ("Africa/Cairo", "1day", "2027-04-30T00:00", "2027-04-29T22:00", "2027-04-30T21:00", 23),
        ("America/Havana", "1day", "2027-11-07T12:00", "2027-11-07T04:00", "2027-11-08T05:00", 25),
        # Shorter periods are those of UTC, also where the offset has half hours.
        ("Asia/Kolkata", "1hour", "2027-05-01T10:15", "2027-05-01T10:00", "2027-05-01T11:00", 1),
        ("Asia/Kolkata", "1day", "2027-05-01T10:15", "2027-04-30T18:30", "2027-05-01T18:30", 24),
    ],
)
def test_periods_in_time_zones(zone: str, period: str, now: str, starts: str, ends: str, hours: int) -> None:
    """Start, end and length of the period that holds an instant; its end names it too."""
    number = window_number(period, utc(now), zone)

    assert window_start(period, number, zone) == utc(starts)
    assert window_start(period, number + 1, zone) == utc(ends)
    assert utc(ends) - utc(starts) == timedelta(hours=hours)
    assert window_number(period, utc(starts), zone) == number
    assert window_number(period, utc(starts) - timedelta(milliseconds=1), zone) == number - 1
    for wrong in (-hours / 3, 0, hours / 3):
        assert window_ending(period, utc(ends) + timedelta(hours=wrong), zone) == number


@given(
    st.datetimes(datetime(2000, 1, 1), datetime(2036, 12, 31), timezones=st.just(UTC)),  # noqa: DTZ001 - hypothesis adds it
    st.sampled_from(ZONES),
    st.sampled_from(CALENDAR),
)
def test_each_instant_is_in_one_period(now: datetime, zone: str, period: str) -> None:
    """Periods follow each other without gap and overlap, and begin on the clock of the zone at the start of a day."""
    number = window_number(period, now, zone)
    start, end = window_start(period, number, zone), window_start(period, number + 1, zone)

    assert start <= now < end
    assert window_number(period, start, zone) == number
    assert window_number(period, end, zone) == number + 1
    local = start.astimezone(zone_of(zone or "UTC"))
    assert local.hour in (0, 1)  # 01:00 where clocks skip midnight.
    assert (local.minute, local.second) == (0, 0)


@pytest.mark.parametrize(
    "name",
    ["", "Amsterdam", "Europe", "Europe/", "../Europe/Amsterdam", "/etc/passwd", "Europe/Amsterdam\0", "x" * 500],
)
def test_unknown_zones_are_rejected(name: str) -> None:
    """Only keys of the database are zones, never paths."""
    with pytest.raises(ValueError, match="is not a time zone of the IANA database, such as Europe/Amsterdam"):
        zone_of(name)


def test_offsets_hold_from_the_instants_of_their_changes() -> None:
    """Two and a half years around the half year of an instant; one offset where clocks do not change."""
    half_year = int(utc("2027-06-01T00:00").timestamp()) // HALF_YEAR_S
    offsets = offsets_near("Europe/Amsterdam", half_year)

    assert {frozenset(pair) for pair in zip(offsets[::2], offsets[2::2], strict=False)} == {frozenset((3600, 7200))}
    assert list(offsets[1::2]) == sorted(offsets[1::2])
    assert int(utc("2027-03-28T01:00").timestamp()) in offsets[1::2]
    assert int(utc("2027-10-31T01:00").timestamp()) in offsets[1::2]
    assert offsets_near("Asia/Kolkata", half_year) == (19_800,)
