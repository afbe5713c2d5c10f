"""Quota windows: ratelimit/lua/quota.lua against the calendar of Python, over four centuries."""

import random
from datetime import UTC, datetime, timedelta
from importlib.resources import files

import pytest
from redis.asyncio import Redis

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SCRIPT = (
    "local now = tonumber(ARGV[1])\n"
    + files("ratelimit").joinpath("lua", "quota.lua").read_text("utf-8")
    + "\nlocal number, ends = window(ARGV[2])\nreturn {number, string.format('%.0f', ends)}"
)


async def window(client: Redis, moment: datetime, period: str) -> tuple[int, datetime]:
    """The window's number, and when it ends."""
    now_ms = (moment - EPOCH) // timedelta(milliseconds=1)
    number, ends = await client.eval(SCRIPT, 0, now_ms, period)
    return int(number), EPOCH + timedelta(milliseconds=int(ends))


def first_of(year: int, month: int) -> datetime:
    """Midnight UTC of a month's first day; months over 12 are of later years."""
    return datetime(year + (month - 1) // 12, (month - 1) % 12 + 1, 1, tzinfo=UTC)


def moments() -> list[datetime]:
    random.seed(4)
    edges = [
        datetime(2028, 2, 28, 23, 59, 59, 999000, UTC),
        datetime(2028, 2, 29, tzinfo=UTC),
        datetime(2100, 3, 1, tzinfo=UTC),
    ]
    edges += [datetime(2026, 12, 31, 23, 59, 59, 999000, UTC), datetime(2027, 1, 1, tzinfo=UTC), EPOCH]
    return edges + [EPOCH + timedelta(seconds=random.uniform(0, 400 * 365.25 * 86400)) for _ in range(500)]


async def test_a_month_is_the_calendars(client: Redis) -> None:
    """It ends at midnight UTC before the first of the next month, leap years and centuries included."""
    for moment in moments():
        number, ends = await window(client, moment, "1month")

        assert number == (moment.year - 1970) * 12 + moment.month - 1, moment
        assert ends == first_of(moment.year, moment.month + 1), moment


async def test_a_year_is_the_calendars(client: Redis) -> None:
    """Likewise, and two years together begin with an even one after 1970."""
    for moment in moments()[:100]:
        assert await window(client, moment, "1year") == (moment.year - 1970, first_of(moment.year + 1, 1))
        number, ends = await window(client, moment, "2year")
        assert (number, ends) == ((moment.year - 1970) // 2, first_of(1970 + 2 * ((moment.year - 1970) // 2 + 1), 1))


@pytest.mark.parametrize(
    ("period", "length"),
    [
        ("1second", timedelta(seconds=1)),
        ("15minute", timedelta(minutes=15)),
        ("6hour", timedelta(hours=6)),
        ("1day", timedelta(days=1)),
        ("7day", timedelta(days=7)),
    ],
)
async def test_shorter_windows_are_counted_from_the_epoch(client: Redis, period: str, length: timedelta) -> None:
    """So a day is a UTC day, and all servers agree without being told."""
    for moment in moments()[:100]:
        number, ends = await window(client, moment, period)

        assert number == (moment - EPOCH) // length
        assert ends == EPOCH + (number + 1) * length
        assert moment < ends
