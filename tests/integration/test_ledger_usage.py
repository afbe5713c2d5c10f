"""What a customer has used, as the audit knows it: the last day, and the windows of its quotas."""

import random
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from itertools import count
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from integration.ledger_fixtures import database_url, db, dsn, postgres_server
from ledger.audit.queries import Usage, find_usage
from ledger.audit.quota_restore import quota_spent
from ledger.catalog.loader import load
from ledger.catalog.quotas import window_number, window_start
from scheduler.protocol.limits import QuotaSpent

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
NUMBERS = count(1)
NOON = datetime(2026, 3, 15, 12, tzinfo=UTC)


def ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


@pytest.fixture
async def acme(db: Connection) -> str:
    """The id of a customer `acme` in the tier paid."""
    customer: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('acme', 'paid') RETURNING id::text")
    await db.execute("INSERT INTO models (name, pool) VALUES ('tiny', 'default'), ('large', 'second')")
    return customer


async def ask(
    db: Connection,
    customer: str,
    at: datetime,
    status: str = "completed",
    code: str | None = None,
    *,
    tokens: int = 10,
    model: str = "tiny",
) -> None:
    """One row of the audit."""
    await db.execute(
        "INSERT INTO requests (id, created_at, customer_id, tier, model, status, error_code, tokens_used) "
        "VALUES ($1, $2, $3, 'paid', $7, $4, $5, $6)",
        f"req_{next(NUMBERS):032x}",
        at,
        customer,
        status,
        code,
        tokens,
        model,
    )


async def test_usage_is_that_of_the_last_day(db: Connection, acme: str) -> None:
    """Open requests count as requests; neither older ones nor another customer's count at all."""
    other = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('other', 'paid') RETURNING id::text")
    now = datetime.now(UTC)
    await ask(db, acme, now)
    await ask(db, acme, now - timedelta(hours=23), tokens=2**31 - 1)
    await ask(db, acme, now - timedelta(hours=1), "failed", "gpu_timeout", tokens=0)
    await ask(db, acme, now, "queued", tokens=0)
    await ask(db, acme, now - timedelta(hours=25))
    await ask(db, other, now)

    assert await find_usage(db, acme) == Usage(requests=4, completed=2, failed=1, tokens_used=2**31 + 9)


async def test_usage_takes_the_index(db: Connection, acme: str) -> None:
    """However many other customers there are; and the connection is as it was."""
    await db.execute("SET enable_seqscan = off")  # A table of nothing is read whole otherwise.
    usage = "SELECT count(*) FROM requests WHERE customer_id = $1 AND created_at > now() - interval '24 hours'"
    plan = "\n".join(row[0] for row in await db.fetch(f"EXPLAIN {usage}", acme))
    before = await db.fetchval("SHOW statement_timeout")
    await find_usage(db, acme)

    assert "customer_id_created_at" in plan
    assert await db.fetchval("SHOW statement_timeout") == before


async def test_usage_is_given_up_in_time(database_url: str, db: Connection, acme: str) -> None:
    """A page of its own account must not hang on a busy database."""
    locking = await asyncpg.connect(dsn(database_url))
    async with locking.transaction():
        await locking.execute("LOCK TABLE requests IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(asyncpg.QueryCanceledError):
            await find_usage(db, acme, timeout_ms=50)
    await locking.close()

    assert await find_usage(db, acme) == Usage(0, 0, 0, 0)


async def test_what_was_spent_of_each_quota_is_counted_in_its_present_window(db: Connection, acme: str) -> None:
    """Day, month and hours of UTC; a failure of ours costs nothing, the client's own does; no window, no count."""
    await db.execute(
        "INSERT INTO quotas (customer_id, quota) VALUES ($1::text::uuid, '100/day'), ($1::text::uuid, '9/2 hours')",
        acme,
    )
    await db.execute("INSERT INTO quotas (tier, quota) VALUES ('paid', '1000/month')")
    free = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('free', 'free') RETURNING id::text")
    for hours in (0, 1, 11.9, 12.1, 24 * 14, 24 * 15):  # Today: three; this month: two more; and one of February.
        await ask(db, acme, NOON - timedelta(hours=hours))
    await ask(db, acme, NOON + timedelta(hours=1.5), "failed", "poison_request")
    await ask(db, acme, NOON, "failed", "worker_lost")
    await ask(db, acme, NOON, "queued")
    await ask(db, acme, NOON + timedelta(hours=12))
    await ask(db, free, NOON)
    spent = await quota_spent(db, await load(db), now=NOON)

    assert sorted(spent) == [
        QuotaSpent(acme, "1day", ms(datetime(2026, 3, 15, tzinfo=UTC)), 5),
        QuotaSpent(acme, "1month", ms(datetime(2026, 3, 1, tzinfo=UTC)), 8),
        QuotaSpent(acme, "2hour", ms(NOON), 3),
    ]


async def test_quotas_are_counted_over_all_pools(db: Connection, acme: str) -> None:
    """A customer has one quota, wherever its requests ran, also of a model that is gone from the catalog."""
    await db.execute("INSERT INTO quotas (customer_id, quota) VALUES ($1::text::uuid, '100/day')", acme)
    for model in ("tiny", "large", "large"):
        await ask(db, acme, NOON, model=model)

    assert [one.spent for one in await quota_spent(db, await load(db), now=NOON)] == [3]


async def test_windows_are_those_in_which_redis_counts(client: Redis) -> None:
    """What is restored must stand under the very number that the script looks for."""
    draw = random.Random(1)
    windows = files("ratelimit").joinpath("lua", "quota.lua").read_text("utf-8")
    script = f"local now = tonumber(ARGV[1])\n{windows}\nreturn {{window(ARGV[2])}}"
    units = ("second", "minute", "hour", "day", "month", "year")
    edges = [datetime(year, month, 1, tzinfo=UTC) for year in (1972, 1999, 2000, 2026, 2100) for month in (1, 2, 3, 12)]
    moments = edges + [at - timedelta(milliseconds=1) for at in edges]
    moments += [datetime.fromtimestamp(draw.randrange(4 * 10**12) / 1000, UTC) for _ in range(200)]
    for now in moments:
        period = f"{draw.choice((1, 1, 2, 3, 7, 9999))}{draw.choice(units)}"
        ms = (now - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
        number, ends = await client.eval(script, 0, ms, period)
        ours = window_number(period, now)

        assert (period, now, ours) == (period, now, number)
        if ends < 200 * 365 * 86_400_000:
            assert window_start(period, ours + 1).timestamp() * 1000 == ends


async def test_nothing_is_counted_where_nobody_has_a_quota(db: Connection, acme: str) -> None:
    """And the time is PostgreSQL's where none is given."""
    await ask(db, acme, datetime.now(UTC))
    without = await quota_spent(db, await load(db))
    await db.execute("INSERT INTO quotas (tier, quota) VALUES ('paid', '1000/year')")

    assert without == []
    assert [one.spent for one in await quota_spent(db, await load(db))] == [1]
