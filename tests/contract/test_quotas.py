"""Quota windows against Python's calendar, and quotas restored from the audit after a loss of Redis."""

import random
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path

import pytest
from redis.asyncio import Redis

from contract.builders import CUSTOMER, admit
from pool import Pool
from ratelimit.periods import window_number, window_start
from scheduler.errors import ErrorCode
from scheduler.protocol.limits import CHUNK, QuotaRestore, QuotaSpent
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from tierlane_local.embedded.redis import EmbeddedRedis

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SCRIPT = (
    "local now = tonumber(ARGV[1])\n"
    + files("ratelimit").joinpath("lua", "quota.lua").read_text("utf-8")
    + "\nlocal number, ends_at = window(ARGV[2])\nreturn {number, string.format('%.0f', ends_at)}"
)


async def window(client: Redis, time: datetime, period: str) -> tuple[int, datetime]:
    """The number of the window, and its end."""
    number, ends_at = await client.eval(SCRIPT, 0, (time - EPOCH) // timedelta(milliseconds=1), period)
    return int(number), EPOCH + timedelta(milliseconds=int(ends_at))


def first_of(year: int, month: int) -> datetime:
    """Midnight UTC of the first day of a month; months over 12 are of later years."""
    return datetime(year + (month - 1) // 12, (month - 1) % 12 + 1, 1, tzinfo=UTC)


def times() -> list[datetime]:
    """Edges of weeks, months and years, and random times of four centuries."""
    random.seed(4)
    edges = [
        datetime(2028, 2, 28, 23, 59, 59, 999000, UTC),
        datetime(2028, 2, 29, tzinfo=UTC),
        datetime(2100, 3, 1, tzinfo=UTC),
        datetime(2026, 12, 31, 23, 59, 59, 999000, UTC),
        datetime(2027, 1, 1, tzinfo=UTC),
        datetime(2027, 1, 3, 23, 59, 59, 999000, UTC),
        datetime(2027, 1, 4, tzinfo=UTC),
        EPOCH,
    ]
    return edges + [EPOCH + timedelta(seconds=random.uniform(0, 400 * 365.25 * 86400)) for _ in range(300)]


async def test_weeks_months_and_years_are_those_of_the_calendar(client: Redis) -> None:
    """Leap years and centuries included; windows of two years begin with an even number of years after 1970.

    Weeks begin on Monday; they are counted from the week of 1970-01-01.
    """
    for time in times():
        years = time.year - 1970
        monday = datetime(time.year, time.month, time.day, tzinfo=UTC) - timedelta(days=time.weekday())
        weeks = (monday - datetime(1969, 12, 29, tzinfo=UTC)) // timedelta(weeks=1)
        expected = {
            "1week": (weeks, monday + timedelta(weeks=1)),
            "2week": (weeks // 2, monday + timedelta(weeks=2 - weeks % 2)),
            "1month": (years * 12 + time.month - 1, first_of(time.year, time.month + 1)),
            "1year": (years, first_of(time.year + 1, 1)),
            "2year": (years // 2, first_of(1970 + 2 * (years // 2 + 1), 1)),
        }
        assert {period: await window(client, time, period) for period in expected} == expected, time


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
    """A day is a UTC day; windows of 7 days begin on Thursdays."""
    for time in times()[:100]:
        number = (time - EPOCH) // length
        assert await window(client, time, period) == (number, EPOCH + (number + 1) * length)


# Time zones

EAST, WEST = "Etc/GMT-14", "Etc/GMT+12"
"""26 hours apart: wherever it is day, their dates differ."""


async def test_a_change_of_the_zone_forgets_and_doubles_no_count(pool: Pool) -> None:
    """A window lasts until the next date begins: its count holds in the west, and a later date has a new amount, once."""
    day = {"quotas": [("1day", 10)]}
    assert await admit(pool, 6, **day, zone=EAST) == ["accepted"] * 6
    assert await admit(pool, 5, **day, zone=WEST) == ["accepted"] * 4 + ["quota"]
    assert await admit(pool, 1, **day, zone=EAST) == ["quota"]
    assert await admit(pool, 1, **day) == ["quota"]

    other = {"customer_id": "other", **day}
    assert await admit(pool, 11, **other, zone=WEST) == ["accepted"] * 10 + ["quota"]
    assert await admit(pool, 11, **other, zone=EAST) == ["accepted"] * 10 + ["quota"]
    assert await admit(pool, 1, **other, zone=WEST) == ["quota"]


@pytest.mark.parametrize(
    ("before", "zone"), [(EAST, WEST), (WEST, WEST), (EAST, "Asia/Kolkata"), (EAST, "America/New_York")]
)
async def test_the_wait_is_until_the_real_end(pool: Pool, before: str, zone: str) -> None:
    """That of the window in force, whose date may be one of the zone before."""
    assert await admit(pool, 2, quotas=[("1day", 2)], zone=before) == ["accepted"] * 2
    (verdict,) = await pool.admit([pool.submission(quotas=[("1day", 2)], zone=zone)])

    now = EPOCH + timedelta(milliseconds=await pool.now_ms())
    number = max(window_number("1day", now, each) for each in (before, zone))
    ends_ms = (window_start("1day", number + 1, zone) - now) / timedelta(milliseconds=1)
    assert verdict.outcome == "quota"
    assert verdict.retry_after_ms == verdict.left.quotas[0][1] == pytest.approx(ends_ms, abs=5000)


async def test_hours_are_those_of_utc_in_each_zone(pool: Pool) -> None:
    """Also where the offset has half hours, so a change of the zone changes nothing."""
    quotas = [("2hour", 5)]
    for zone in ("", "Asia/Kolkata", EAST, WEST, ""):
        assert await admit(pool, 1, quotas=quotas, zone=zone) == ["accepted"]
    assert await admit(pool, 1, quotas=quotas) == ["quota"]


async def test_the_present_window_is_restored_for_its_zone(pool: Pool) -> None:
    """The number is that of the date there. Of a window before the stored one nothing is restored: its use is over."""
    now = EPOCH + timedelta(milliseconds=await pool.now_ms())

    def used_in(zone: str, spent: int) -> QuotaSpent:
        number = window_number("1day", now, zone)
        start, end = (int(window_start("1day", n, zone).timestamp() * 1000) for n in (number, number + 1))
        return QuotaSpent("customer", "1day", number, start, end, spent)

    restore = QuotaRestore(pool.client, pool.keys)
    assert await restore.apply([used_in(EAST, 8)]) == 1
    assert await admit(pool, 3, quotas=[("1day", 10)], zone=EAST) == ["accepted", "accepted", "quota"]
    assert await restore.apply([used_in(WEST, 50)]) == 0
    assert await admit(pool, 1, quotas=[("1day", 11)], zone=WEST) == ["accepted"]


# Restore after a loss of Redis

YEAR = [("1year", 10)]


def used(customer: str, at_ms: int, spent: int) -> QuotaSpent:
    """What a customer used of its quota in the year of a time."""
    number = window_number("1year", EPOCH + timedelta(milliseconds=at_ms))
    start, end = (int(window_start("1year", n).timestamp() * 1000) for n in (number, number + 1))
    return QuotaSpent(customer, "1year", number, start, end, spent)


async def test_a_restore_is_wanted_once_per_epoch(pool: Pool) -> None:
    """After a loss of data, and when another server took over: its run_id differs from the one of the epoch."""
    restore = QuotaRestore(pool.client, pool.keys)
    assert await restore.wanted()
    assert await restore.apply([]) == 0
    assert not await restore.wanted()

    await pool.client.flushall()
    assert not await restore.wanted()  # it is not used yet
    before = (await pool.gateway_lives("g1")).epoch_us
    assert await restore.wanted()
    await restore.apply([])

    await pool.client.delete(pool.keys.epoch_run)  # written by an older version: no loss
    assert (await pool.gateway_lives("g1")).epoch_us == before
    await pool.client.set(pool.keys.epoch_run, "0" * 40)  # in the dump of another server
    after = (await pool.gateway_lives("g1")).epoch_us
    assert after > before
    assert await restore.wanted()
    assert (await pool.gateway_lives("g1")).epoch_us == after


@pytest.mark.parametrize(
    ("spent", "restored", "age_ms", "raised", "outcomes"),
    [
        (0, 8, 0, 1, ["accepted", "accepted", "quota"]),
        (9, 5, 0, 0, ["accepted", "quota", "quota"]),  # the audit lags: the higher count is right
        (0, 10, 400 * 86_400_000, 0, ["accepted"] * 3),  # of a past window
    ],
)
async def test_counts_are_only_raised(
    pool: Pool, spent: int, restored: int, age_ms: int, raised: int, outcomes: list[str]
) -> None:
    """Restored requests count against the quota."""
    await admit(pool, spent, quotas=YEAR)
    began_ms = await pool.now_ms() - age_ms

    restore = QuotaRestore(pool.client, pool.keys)
    assert await restore.apply([used("customer", began_ms, restored)]) == raised

    assert await admit(pool, 3, quotas=YEAR) == outcomes
    assert await pool.client.pttl(CUSTOMER) > 0


async def test_a_refund_keeps_restored_quotas(pool: Pool) -> None:
    """Regression: the hash with restored quotas has no bucket yet, and the refund of an earlier request must add none."""
    submission = pool.submission(quotas=YEAR)
    await pool.admit([submission])
    await pool.client.delete(CUSTOMER)
    await QuotaRestore(pool.client, pool.keys).apply([used("customer", await pool.now_ms(), 8)])

    await pool.terminations.cancel([(submission.id, ErrorCode.WORKER_LOST)])

    fields = await pool.client.hgetall(CUSTOMER)
    assert list(fields) == [b"q:1year"]
    assert fields[b"q:1year"].split()[1] == b"7"


async def test_many_quotas_are_restored_in_several_calls(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if Redis is lost between two calls, the restore is still wanted afterwards."""
    now = await pool.now_ms()
    spent = [used(f"c{n}", now, 1) for n in range(2 * CHUNK + 1)]
    assert await QuotaRestore(pool.client, pool.keys).apply(spent) == len(spent)
    assert await admit(pool, customer_id=f"c{2 * CHUNK}", quotas=[("1year", 1)]) == ["quota"]

    restore = QuotaRestore(pool.client, pool.keys)
    script = restore._script

    async def interrupted(packed_spent: bytes, told: bytes) -> int:
        raised = int(await script(packed_spent, told))
        if not told:
            await pool.client.flushall()
            await pool.gateway_lives("g1")
        return raised

    monkeypatch.setattr(restore, "_script", interrupted)
    await restore.apply(spent)
    assert await restore.wanted()


async def test_quotas_are_restored_after_a_restart_from_an_older_dump(tmp_path: Path) -> None:
    """With a real server: requests after the dump count by the audit."""
    home = tmp_path / "redis"
    options = ("--appendonly", "no")
    server = EmbeddedRedis(home, home / "socket", extra_args=options)
    await server.start()
    client = command_client(server.url, 5.0)
    pool = Pool(client, Keys())
    first = await pool.gateway_lives("g1")
    await QuotaRestore(client, pool.keys).apply([])
    assert await admit(pool, 2, quotas=YEAR) == ["accepted"] * 2
    await client.save()
    assert await admit(pool, 6, quotas=YEAR) == ["accepted"] * 6
    now = await pool.now_ms()
    await client.aclose()
    server.kill()

    again = EmbeddedRedis(home, home / "socket", extra_args=options)
    await again.start()
    client = command_client(again.url, 5.0)
    pool = Pool(client, Keys())
    try:
        assert (await pool.gateway_lives("g1")).epoch_us != first.epoch_us
        restore = QuotaRestore(client, pool.keys)
        assert await restore.wanted()
        assert await restore.apply([used("customer", now, 8)]) == 1
        assert await admit(pool, 3, quotas=YEAR) == ["accepted", "accepted", "quota"]
    finally:
        await client.aclose()
        await again.stop()
