"""The database's own rules, and the use of customers in the audit."""

import json
import random
import re
import time
from datetime import UTC, date, datetime, timedelta
from importlib.resources import files
from itertools import count
from typing import Any
from uuid import uuid4
from zlib import crc32

import asyncpg
import msgspec
import pytest
from redis.asyncio import Redis

from integration.ledger_fixtures import database_url, db, dsn, postgres_server
from ledger.audit.queries import Usage, find_usage
from ledger.audit.quota_restore import quota_spent
from ledger.catalog.api_key import mint, verify
from ledger.catalog.loader import load
from ledger.jobs import JobEnd, NewJob, end_jobs, insert_jobs
from pool import Pool
from ratelimit.periods import HALF_YEAR_S, offsets_near, window_number, window_start
from ratelimit.quotas import PERIOD_S
from scheduler.errors import RequestError
from scheduler.protocol.limits import QuotaSpent
from scheduler.redis_client.keys import Keys

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
KEY = "INSERT INTO api_keys (id, customer_id, name, secret_hash, requests_per_second, burst) SELECT 'abcdefghijkl', id, 'n', sha256(''), "
ID = "req_" + "0" * 12 + "7" + "0" * 19
REQUEST = "INSERT INTO requests (id, created_at, status) VALUES"
NUMBERS = count(1)
NOON = datetime(2026, 3, 15, 12, tzinfo=UTC)
# With changes of clocks in both halves of the year, at midnight, of half an hour; east and west of the date line; none.
ZONES = (
    *(
        "Europe/Amsterdam",
        "America/New_York",
        "Africa/Cairo",
        "America/Havana",
        "America/Santiago",
        "Australia/Lord_Howe",
    ),
    *("Pacific/Kiritimati", "Pacific/Pago_Pago", "Asia/Kolkata", "Africa/Casablanca", "UTC"),
)


@pytest.fixture
async def acme(db: Connection) -> str:
    """The id of a customer `acme` of the tier paid; there are models of two pools."""
    customer: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('acme', 'paid') RETURNING id::text")
    await db.execute("INSERT INTO models (name, pool) VALUES ('tiny', 'default'), ('large', 'second')")
    return customer


async def test_the_default_tiers(db: Connection) -> None:
    """Priority, guaranteed share, shedding depth and token limit of each."""
    rows = await db.fetch(
        "SELECT name, priority, guaranteed_share, shed_depth, tokens_per_minute, shadow FROM tiers ORDER BY priority"
    )

    assert [tuple(row) for row in rows] == [
        ("enterprise", 1, 0.05, None, 60_000_000, False),
        ("paid", 2, 0.25, 500, 12_000_000, False),
        ("free", 3, 0.10, 100, 2_400_000, False),
    ]


@pytest.mark.parametrize(
    ("sql", "constraint"),
    [
        ("UPDATE tiers SET guaranteed_share = 1.5 WHERE name = 'free'", "ck_tiers_guaranteed_share"),
        ("UPDATE tiers SET guaranteed_share = 0.8 WHERE name = 'free'", "tiers_guaranteed_shares"),
        ("UPDATE tiers SET guaranteed_share = 'NaN' WHERE name = 'free'", "ck_tiers_guaranteed_share"),
        ("UPDATE tiers SET requests_per_second = 0", "ck_tiers_requests_per_second"),
        ("UPDATE tiers SET requests_per_second = 'Infinity'", "ck_tiers_requests_per_second"),
        ("UPDATE tiers SET burst = 'NaN'", "ck_tiers_burst"),
        ("UPDATE tiers SET max_concurrency = -1", "ck_tiers_max_concurrency"),
        ("UPDATE tiers SET max_queue_ms = 0", "ck_tiers_max_queue_ms"),
        ("UPDATE tiers SET shed_depth = 0", "ck_tiers_shed_depth"),
        ("UPDATE tiers SET tokens_per_minute = 0", "ck_tiers_tokens_per_minute"),
        ("UPDATE tiers SET slo_ms = 0", "ck_tiers_slo_ms"),
        ("UPDATE tiers SET slo_success = 1", "ck_tiers_slo_success"),
        ("UPDATE tiers SET slo_success = 'NaN'", "ck_tiers_slo_success"),
        ("UPDATE tiers SET priority = 1", "uq_tiers_priority"),
        ("UPDATE tiers SET priority = 0 WHERE priority = 1", "ck_tiers_priority"),
        ("UPDATE tiers SET name = 'Two Words' WHERE name = 'free'", "ck_tiers_name"),
        ("DELETE FROM tiers WHERE name = 'paid'", "fk_customers_tier"),
        ("UPDATE customers SET status = 'gone'", "ck_customers_status"),
        ("UPDATE customers SET tier = 'gold'", "fk_customers_tier"),
        ("UPDATE customers SET burst = 0", "ck_customers_burst"),
        ("UPDATE customers SET name = ' acme'", "ck_customers_name"),
        ("INSERT INTO customers (name, tier) VALUES ('acme', 'free')", "uq_customers_name"),
        ("INSERT INTO quotas (tier, quota) VALUES ('free', 'plenty')", "ck_quotas_quota"),
        ("INSERT INTO quotas (tier, quota) VALUES ('free', '0/day')", "ck_quotas_quota"),
        ("INSERT INTO quotas (quota) VALUES ('10/day')", "ck_quotas_owner"),
        ("INSERT INTO quotas (tier, quota) VALUES ('free', '1/day'), ('free', '1/day')", "uq_quotas_customer_id"),
        (f"{KEY} 1, NULL::float8 FROM customers", "ck_api_keys_limit"),
        (f"{KEY} NULL::float8, 1 FROM customers", "ck_api_keys_limit"),
        (f"{KEY} 0, 1 FROM customers", "ck_api_keys_requests_per_second"),
        (f"{KEY} 'NaN'::float8, 1 FROM customers", "ck_api_keys_requests_per_second"),
        (f"{KEY} 1, 0.5 FROM customers", "ck_api_keys_burst"),
        (f"{KEY} 1, 'Infinity'::float8 FROM customers", "ck_api_keys_burst"),
        (f"{KEY} 1, 1 FROM customers".replace("sha256('')", "''"), "ck_api_keys_secret_hash"),
        ("INSERT INTO models (name) VALUES ('no spaces')", "ck_models_name"),
        ("INSERT INTO models (name, target_utilization) VALUES ('m', 0)", "ck_models_target_utilization"),
        ("INSERT INTO models (name, max_batch_size) VALUES ('m', 0)", "ck_models_max_batch_size"),
        ("INSERT INTO models (name, rps_per_gpu) VALUES ('m', 'NaN')", "ck_models_rps_per_gpu"),
        ("INSERT INTO catalog_version (single, version) VALUES (false, 1)", "ck_catalog_version_single"),
        (f"{REQUEST} ('req_1', now(), 'queued')", "ck_requests_id"),
        (f"{REQUEST} ('{ID}', now(), 'lost')", "ck_requests_status"),
        (f"{REQUEST} ('{ID}', now(), 'failed')", "ck_requests_error_code"),
        (
            f"INSERT INTO requests (id, created_at, status, mode) VALUES ('{ID}', now(), 'queued', 'x')",
            "ck_requests_mode",
        ),
    ],
)
async def test_an_invalid_value_violates_a_named_constraint(
    db: Connection, acme: str, sql: str, constraint: str
) -> None:
    """The error names the rule."""
    with pytest.raises(asyncpg.IntegrityConstraintViolationError) as error:
        await db.execute(sql)

    assert error.value.constraint_name == constraint


async def test_tiers_can_exchange_priorities_and_shares(db: Connection) -> None:
    """In one statement, or in several with deferred constraints."""
    await db.execute("UPDATE tiers SET priority = 4 - priority")
    async with db.transaction():
        await db.execute("SET CONSTRAINTS ALL DEFERRED")
        await db.execute("UPDATE tiers SET guaranteed_share = 1 WHERE name = 'free'")
        await db.execute("UPDATE tiers SET guaranteed_share = 0 WHERE name <> 'free'")

    rows = await db.fetch("SELECT name, priority, guaranteed_share FROM tiers ORDER BY priority")
    assert [tuple(row) for row in rows] == [("free", 1, 1.0), ("paid", 2, 0.0), ("enterprise", 3, 0.0)]


async def test_keys_issued_by_sql_are_verified_by_python(db: Connection, acme: str) -> None:
    """SQL and Python use the same form, checksum and hash; no table contains a secret; the expiry is that of the row."""
    keys = [await db.fetchval("SELECT issue_api_key('acme', $1)", f"key {n}") for n in range(20)]
    expiring = await db.fetchval("SELECT issue_api_key('acme', 'ci', to_timestamp(4000000000.5))")
    snapshot = await load(db)
    form = re.sub(r"[0-9a-zA-Z]", "x", mint().text)
    stored = str(await db.fetch("SELECT a, c FROM api_keys a, config_changes c"))

    assert len(set(keys)) == 20
    for key in keys:
        identity = verify(key, snapshot, time.time())
        assert re.sub(r"[0-9a-zA-Z]", "x", key) == form
        assert (identity.customer_name, identity.tier, identity.key_id) == ("acme", "paid", key[3:15])
        assert (key[3:15] in stored, key[16:44] in stored) == (True, False)
    assert verify(expiring, snapshot, 4000000000.4).customer_name == "acme"
    with pytest.raises(RequestError):
        verify(expiring, snapshot, 4000000000.6)
    with pytest.raises(asyncpg.NoDataFoundError, match="there is no customer named"):
        await db.fetchval("SELECT issue_api_key('nobody', 'ci')")
    for data in (b"", b"123456789", bytes(range(256))):
        assert await db.fetchval("SELECT tierlane_crc32($1)", data) == crc32(data)


async def test_each_statement_increments_the_catalog_version(db: Connection, acme: str) -> None:
    """Once, however many rows it changes; the last use of a key does not.

    After TRUNCATE and changes of the record, `whole_version` shows that older snapshots must be read again.
    """
    await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    read = "SELECT version, version - whole_version FROM catalog_version"
    steps = []
    for sql in (
        "UPDATE tiers SET burst = burst",
        "INSERT INTO models (name) VALUES ('a'), ('b')",
        "DELETE FROM models",
        "INSERT INTO quotas (tier, quota) VALUES ('free', '10/day')",
        "UPDATE api_keys SET last_used_at = now()",
        "UPDATE api_keys SET revoked_at = now()",
        "UPDATE api_keys SET requests_per_second = 1, burst = 1",
        "UPDATE customers SET status = 'suspended'",
        "UPDATE customers SET status = 'suspended' WHERE false",
        "DELETE FROM config_changes",
        "UPDATE tiers SET burst = 1",
        "TRUNCATE quotas",
    ):
        before = await db.fetchval("SELECT version FROM catalog_version")
        await db.execute(sql)
        version, since_whole = await db.fetchrow(read)
        steps.append((version - before, since_whole))

    assert [step for step, _ in steps] == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]
    assert [since_whole for _, since_whole in steps[-3:]] == [0, 1, 0]
    assert steps[0][1] > 0
    await db.execute("DELETE FROM catalog_version")
    await db.execute("UPDATE tiers SET burst = 2")
    assert tuple(await db.fetchrow("SELECT version, whole_version FROM catalog_version")) == (1, 1)


async def test_changes_are_recorded_with_old_and_new_values(db: Connection, acme: str) -> None:
    """Actor, row and values, without hashes of secrets; an update to the same values and the use of a key are not."""
    await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    await db.execute("DELETE FROM config_changes")
    await db.execute("UPDATE api_keys SET last_used_at = now()")
    await db.execute("UPDATE tiers SET burst = burst")
    await db.execute("UPDATE tiers SET burst = 7 WHERE name = 'free'")
    async with db.transaction():
        await db.execute("SET LOCAL tierlane.actor = 'ada'")
        await db.execute("UPDATE api_keys SET requests_per_second = 2, burst = 3")
        await db.execute("DELETE FROM customers")

    rows = await db.fetch("SELECT changed_by, table_name, row_key, old, new FROM config_changes ORDER BY id")
    changes = [(row["changed_by"], row["table_name"], row["old"] is None, row["new"] is None) for row in rows]
    assert changes == [
        ("tierlane", "tiers", False, False),
        ("ada", "api_keys", False, False),
        ("ada", "customers", False, True),
        ("ada", "api_keys", False, True),
    ]
    assert rows[0]["row_key"] == "free"
    assert (json.loads(rows[0]["old"])["burst"], json.loads(rows[0]["new"])["burst"]) == (200, 7)
    assert [json.loads(rows[1]["new"])[name] for name in ("requests_per_second", "burst")] == [2, 3]
    assert "secret_hash" not in "".join(str(row["old"]) + str(row["new"]) for row in rows)


async def test_partitions_are_created_once(db: Connection) -> None:
    """For today and the days ahead in UTC; rows of a day that had none are moved out of the default partition."""
    days = [date.today() + timedelta(days=n) for n in range(-1, 11)]  # noqa: DTZ011 - a day of slack on both sides
    late = datetime.now(UTC) + timedelta(days=8)
    await db.execute(f"{REQUEST} ($1, $2, 'queued')", ID, late)
    assert await db.fetchval("SELECT tableoid::regclass::text FROM requests") == "requests_default"

    assert await db.fetchval("SELECT ensure_request_partitions(7)") <= 1  # Midnight may pass.
    assert await db.fetchval("SELECT ensure_request_partitions(9)") == 2
    names = {row[0] for row in await db.fetch("SELECT inhrelid::regclass::text FROM pg_inherits")}
    assert len(names & {f"requests_{day:%Y%m%d}" for day in days}) == 10
    assert await db.fetchval("SELECT tableoid::regclass::text FROM requests") == f"requests_{late:%Y%m%d}"
    with pytest.raises(asyncpg.InvalidParameterValueError, match="0 to 400"):
        await db.execute("SELECT ensure_request_partitions(100000)")


async def test_the_view_of_customer_limits(db: Connection, acme: str) -> None:
    """Own limits or those of the tier, whether the tier is in shadow mode, and each quota once."""
    await db.execute("UPDATE customers SET requests_per_second = 5")
    await db.execute("UPDATE tiers SET shadow = true WHERE name = 'paid'")
    await db.execute(
        "INSERT INTO quotas (customer_id, quota) VALUES ($1::text::uuid, '9/day'), ($1::text::uuid, '7/hour')", acme
    )
    await db.execute(
        "INSERT INTO quotas (tier, quota) VALUES ('paid', '9/day'), ('paid', '99/month'), ('free', '1/day')"
    )

    row = await db.fetchrow(
        "SELECT tier, requests_per_second, burst, max_queue_ms, shadow, quotas FROM customer_limits"
    )
    assert tuple(row) == ("paid", 5.0, 1000.0, None, True, ["7/hour", "9/day", "99/month"])


async def test_the_views_of_usage_and_slo(db: Connection, acme: str) -> None:
    """A cancelled request is no failure of the service; without requests both views are empty."""
    for view in ("customer_limits", "usage_hourly", "tier_slo"):
        assert bool(await db.fetch(f"SELECT * FROM {view}")) is (view == "customer_limits")
    insert = (
        "INSERT INTO requests (id, created_at, customer_id, tier, model, status, error_code, http_status, "
        "latency_ms, tokens_used, cost_ms) VALUES ($1, now(), $2, 'paid', 'tiny', $3, $4, $5, $6, 10, 1.5)"
    )
    rows = [("completed", None, 200), ("completed", None, 200)]
    rows += [("failed", "cancelled", 499), ("failed", "gpu_timeout", 504)]
    for n, row in enumerate(rows):
        await db.execute(insert, ID[:-1] + str(n), acme, *row, 100.0 * (n + 1))

    usage = await db.fetchrow("SELECT customer, requests, completed, failed, tokens_used, cost_ms FROM usage_hourly")
    await db.execute("UPDATE tiers SET slo_ms = 800, slo_success = 0.99 WHERE name = 'paid'")
    slo = await db.fetchrow("SELECT tier, requests, failed, success_ratio, p50_ms, slo_ms, slo_success FROM tier_slo")
    assert tuple(usage) == ("acme", 4, 2, 2, 40, 6.0)
    assert tuple(slo) == ("paid", 4, 1, 0.75, 150.0, 800, 0.99)


def ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


async def request(
    db: Connection,
    customer: str,
    at: datetime,
    status: str = "completed",
    code: str | None = None,
    *,
    tokens: int = 10,
    model: str = "tiny",
) -> None:
    """Insert a row of the audit."""
    await db.execute(
        "INSERT INTO requests (id, created_at, customer_id, tier, model, status, error_code, tokens_used) "
        "VALUES ($1, $2, $3, 'paid', $4, $5, $6, $7)",
        *(f"req_{next(NUMBERS):032x}", at, customer, model, status, code, tokens),
    )


async def test_usage_of_the_last_day(database_url: str, db: Connection, acme: str) -> None:
    """Open requests count, older ones and those of other customers do not. The query has a timeout."""
    other = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('other', 'paid') RETURNING id::text")
    now = datetime.now(UTC)
    await request(db, acme, now)
    await request(db, acme, now - timedelta(hours=23), tokens=2**31 - 1)
    await request(db, acme, now - timedelta(hours=1), "failed", "gpu_timeout", tokens=0)
    await request(db, acme, now, "queued", tokens=0)
    await request(db, acme, now - timedelta(hours=25))
    await request(db, other, now)

    timeout = await db.fetchval("SHOW statement_timeout")
    locking = await asyncpg.connect(dsn(database_url))
    async with locking.transaction():
        await locking.execute("LOCK TABLE requests IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(asyncpg.QueryCanceledError):
            await find_usage(db, acme, timeout_ms=50)
    await locking.close()

    begin = await db.fetchval("SELECT extract(epoch FROM now())::bigint")
    usage = await find_usage(db, acme)
    assert usage == Usage(requests=4, completed=2, failed=1, tokens_used=2**31 + 9, as_of=usage.as_of)
    assert begin <= usage.as_of <= begin + 60
    assert await db.fetchval("SHOW statement_timeout") == timeout


def used(customer_id: str, name: str, start: datetime, end: datetime, spent: int, *, zone: str = "") -> QuotaSpent:
    """What a customer used in the window from `start` to `end`."""
    return QuotaSpent(customer_id, name, window_number(name, start, zone), ms(start), ms(end), spent)


async def test_the_use_of_quotas_is_counted_in_their_windows(db: Connection, acme: str) -> None:
    """Days, months and hours of UTC over all pools; failures of the service and customers without quotas do not count."""
    assert await quota_spent(db, await load(db)) == []
    await db.execute(
        "INSERT INTO quotas (customer_id, quota) VALUES ($1::text::uuid, '100/day'), ($1::text::uuid, '9/2 hours')",
        acme,
    )
    await db.execute("INSERT INTO quotas (tier, quota) VALUES ('paid', '1000/month')")
    free = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('free', 'free') RETURNING id::text")
    models = ("tiny", "large", "deleted", "tiny", "tiny", "tiny")
    for hours, model in zip((0, 1, 11.9, 12.1, 24 * 14, 24 * 15), models, strict=True):
        await request(db, acme, NOON - timedelta(hours=hours), model=model)  # Today: three; this month: two more.
    await request(db, acme, NOON + timedelta(hours=1.5), "failed", "poison_request")
    await request(db, acme, NOON, "failed", "worker_lost", tokens=0)
    await request(db, acme, NOON, "queued")
    await request(db, acme, NOON + timedelta(hours=12))
    await request(db, free, NOON)

    assert sorted(await quota_spent(db, await load(db), now=NOON)) == [
        used(acme, "1day", datetime(2026, 3, 15, tzinfo=UTC), datetime(2026, 3, 16, tzinfo=UTC), 5),
        used(acme, "1month", datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC), 8),
        used(acme, "2hour", NOON, NOON + timedelta(hours=2), 3),
    ]
    # A new day has begun there at 11:00 UTC; it has the request of the next day in UTC, and not that of 00:06.
    await db.execute("UPDATE customers SET time_zone = 'Pacific/Auckland' WHERE id = $1::text::uuid", acme)
    day = datetime(2026, 3, 15, 11, tzinfo=UTC)
    assert used(acme, "1day", day, day + timedelta(days=1), 5, zone="Pacific/Auckland") in await quota_spent(
        db, await load(db), now=NOON
    )
    await db.execute("UPDATE customers SET time_zone = NULL WHERE id = $1::text::uuid", acme)
    await request(db, acme, datetime.now(UTC))  # By default the time is PostgreSQL's.
    assert 1 in [each.spent for each in await quota_spent(db, await load(db)) if each.period == "1day"]


async def test_windows_equal_those_of_redis(client: Redis) -> None:
    """A restored use is stored under the number that the script computes, in UTC and in each zone of the list."""
    draw = random.Random(1)
    windows = files("ratelimit").joinpath("lua", "quota.lua").read_text("utf-8")
    script = (
        f"local now = tonumber(ARGV[1])\n{windows}\nreturn {{window(ARGV[2], ARGV[3] and cmsgpack.unpack(ARGV[3]))}}"
    )
    edges = [datetime(year, month, 1, tzinfo=UTC) for year in (1972, 1999, 2000, 2026, 2100) for month in (1, 2, 3, 12)]
    moments = edges + [at - timedelta(milliseconds=1) for at in edges]
    moments += [datetime.fromtimestamp(draw.randrange(4 * 10**12) / 1000, UTC) for _ in range(200)]
    for now in moments:
        period = f"{draw.choice((1, 1, 2, 3, 7, 9999))}{draw.choice(tuple(PERIOD_S))}"
        now_ms = (now - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
        number, ends, _ = await client.eval(script, 0, now_ms, period)

        assert (period, now, window_number(period, now)) == (period, now, number)
        if ends < 200 * 365 * 86_400_000:
            assert window_start(period, number + 1).timestamp() * 1000 == ends
    for zone in ZONES:
        for now in (
            datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=draw.randrange(366 * 1440)) for _ in range(150)
        ):
            period = f"{draw.choice((1, 1, 1, 2, 3, 7))}{draw.choice(('hour', 'day', 'week', 'month', 'year'))}"
            offsets = msgspec.msgpack.encode(offsets_near(zone, int(now.timestamp()) // HALF_YEAR_S))
            number, ends, _ = await client.eval(script, 0, ms(now), period, offsets)

            assert (zone, period, now, window_number(period, now, zone)) == (zone, period, now, number)
            if ends < ms(now) + 700 * 86_400_000:
                assert (zone, period, now, window_start(period, number + 1, zone).timestamp() * 1000) == (
                    zone,
                    period,
                    now,
                    ends,
                )


async def test_a_job_ends_once(db: Connection, acme: str, client: Redis) -> None:
    """A second end changes neither the result nor the callback; an end for another customer changes nothing."""
    job = Pool(client, Keys()).submission(customer_id=acme, api_key_id="k" * 12, body=b"x")
    await insert_jobs(db, [NewJob(job, 60.0, "https://hooks.example.com/")], "default")

    assert await end_jobs(db, [JobEnd(job.id, "", "other", customer_id=str(uuid4()))], 600.0) == set()
    assert await end_jobs(db, [JobEnd(job.id, "", "first", customer_id=acme)], 600.0) == {job.id}
    before = await db.fetchrow("SELECT * FROM jobs WHERE id = $1", job.id)
    assert await end_jobs(db, [JobEnd(job.id, "worker_lost", "second", customer_id=acme)], 600.0) == set()
    assert await db.fetchrow("SELECT * FROM jobs WHERE id = $1", job.id) == before
    assert (before["status"], before["output"]) == ("completed", b"first")
