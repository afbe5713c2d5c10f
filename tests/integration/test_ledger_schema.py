"""What the database itself refuses, keeps and tells: constraints, partitions, views and the record of changes."""

import json
from datetime import UTC, date, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
KEY = "INSERT INTO api_keys (id, customer_id, name, secret_hash, requests_per_second, burst) SELECT 'abcdefghijkl', id, 'n', sha256(''), "
ID = "req_" + "0" * 12 + "7" + "0" * 19


@pytest.fixture
async def acme(db: Connection) -> str:
    """The id of a customer `acme` in the tier paid."""
    customer: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ('acme', 'paid') RETURNING id::text")
    return customer


async def test_the_default_tiers_are_those_of_the_contract(db: Connection) -> None:
    """Priority, guaranteed share, shedding depth and tokens a minute of enterprise, paid and free; none is on trial."""
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
        ("INSERT INTO models (name) VALUES ('no spaces')", "ck_models_name"),
        ("INSERT INTO models (name, target_utilization) VALUES ('m', 0)", "ck_models_target_utilization"),
        ("INSERT INTO models (name, max_batch_size) VALUES ('m', 0)", "ck_models_max_batch_size"),
        ("INSERT INTO models (name, rps_per_gpu) VALUES ('m', 'NaN')", "ck_models_rps_per_gpu"),
        ("INSERT INTO catalog_version (single, version) VALUES (false, 1)", "ck_catalog_version_single"),
        (
            "INSERT INTO api_keys (id, customer_id, name, secret_hash) SELECT 'abcdefghijkl', id, 'n', '' FROM customers",
            "ck_api_keys_secret_hash",
        ),
        ("INSERT INTO requests (id, created_at, status) VALUES ('req_1', now(), 'queued')", "ck_requests_id"),
        (f"INSERT INTO requests (id, created_at, status) VALUES ('{ID}', now(), 'lost')", "ck_requests_status"),
        (
            f"INSERT INTO requests (id, created_at, status, mode) VALUES ('{ID}', now(), 'queued', 'x')",
            "ck_requests_mode",
        ),
        (f"INSERT INTO requests (id, created_at, status) VALUES ('{ID}', now(), 'failed')", "ck_requests_error_code"),
    ],
)
async def test_nonsense_is_refused_by_a_named_constraint(db: Connection, acme: str, sql: str, constraint: str) -> None:
    """An admin who mistypes hears which rule it breaks, and nothing is changed."""
    with pytest.raises(asyncpg.IntegrityConstraintViolationError) as refused:
        await db.execute(sql)

    assert refused.value.constraint_name == constraint


async def test_tiers_can_trade_places_and_shares(db: Connection) -> None:
    """In one statement, or in several with the checks put off to the end."""
    await db.execute("UPDATE tiers SET priority = 4 - priority")
    async with db.transaction():
        await db.execute("SET CONSTRAINTS ALL DEFERRED")
        await db.execute("UPDATE tiers SET guaranteed_share = 1 WHERE name = 'free'")
        await db.execute("UPDATE tiers SET guaranteed_share = 0 WHERE name <> 'free'")

    rows = await db.fetch("SELECT name, priority, guaranteed_share FROM tiers ORDER BY priority")
    assert [tuple(row) for row in rows] == [("free", 1, 1.0), ("paid", 2, 0.0), ("enterprise", 3, 0.0)]


async def test_each_statement_counts_the_version_up_by_one(db: Connection, acme: str) -> None:
    """However many rows it changes; and the last use of a key is no change."""
    await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    versions = []
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
    ):
        before = await db.fetchval("SELECT version FROM catalog_version")
        await db.execute(sql)
        versions.append(await db.fetchval("SELECT version FROM catalog_version") - before)

    assert versions == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]


async def test_what_rows_cannot_tell_is_counted(db: Connection, acme: str) -> None:
    """After TRUNCATE, and after the record of changes was edited, an older picture cannot be brought up to date by rows."""
    counted = []
    for sql in (
        "UPDATE customers SET burst = 1",
        "TRUNCATE quotas",
        "UPDATE tiers SET burst = 1",
        "DELETE FROM config_changes",
    ):
        await db.execute(sql)
        counted.append(await db.fetchval("SELECT version - whole_version FROM catalog_version"))
    await db.execute("DELETE FROM catalog_version")
    await db.execute("UPDATE tiers SET burst = 2")

    assert counted == [counted[0], 0, 1, 0]
    assert counted[0] > 0
    assert tuple(await db.fetchrow("SELECT version, whole_version FROM catalog_version")) == (1, 1)


async def test_a_keys_own_limit_is_written_down_and_its_use_is_not(db: Connection, acme: str) -> None:
    """The triggers' lists of columns know the new ones."""
    await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    await db.execute("DELETE FROM config_changes")
    await db.execute("UPDATE api_keys SET last_used_at = now()")
    await db.execute("UPDATE api_keys SET requests_per_second = 2, burst = 3")

    rows = await db.fetch("SELECT new ->> 'requests_per_second', new ->> 'burst' FROM config_changes")
    assert [tuple(row) for row in rows] == [("2", "3")]


async def test_changes_are_written_down_with_old_and_new(db: Connection, acme: str) -> None:
    """Who, which row, from what to what; no secret, no hash, and nothing for a change that changes nothing."""
    await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    await db.execute("DELETE FROM config_changes")
    await db.execute("UPDATE api_keys SET last_used_at = now()")
    await db.execute("UPDATE tiers SET burst = burst")
    await db.execute("UPDATE tiers SET burst = 7 WHERE name = 'free'")
    async with db.transaction():
        await db.execute("SET LOCAL tierlane.actor = 'ada'")
        await db.execute("UPDATE api_keys SET revoked_at = now()")
        await db.execute("DELETE FROM customers")

    rows = await db.fetch("SELECT changed_by, table_name, row_key, old, new FROM config_changes ORDER BY id")
    seen = [(row["changed_by"], row["table_name"], row["old"] is None, row["new"] is None) for row in rows]
    assert seen == [
        ("tierlane", "tiers", False, False),
        ("ada", "api_keys", False, False),
        ("ada", "customers", False, True),
        ("ada", "api_keys", False, True),
    ]
    assert (json.loads(rows[0]["old"])["burst"], json.loads(rows[0]["new"])["burst"]) == (200, 7)
    assert rows[0]["row_key"] == "free"
    assert "secret_hash" not in "".join(str(row["old"]) + str(row["new"]) for row in rows)


async def test_partitions_are_made_ahead_and_only_once(db: Connection) -> None:
    """Today and seven days more, in UTC; asking again makes none."""
    days = [date.today() + timedelta(days=n) for n in range(-1, 11)]  # noqa: DTZ011 - a day of slack on both sides

    assert await db.fetchval("SELECT ensure_request_partitions(7)") <= 1  # Midnight may pass.
    assert await db.fetchval("SELECT ensure_request_partitions(9)") == 2
    names = {row[0] for row in await db.fetch("SELECT inhrelid::regclass::text FROM pg_inherits")}
    assert len(names & {f"requests_{day:%Y%m%d}" for day in days}) == 10
    assert "requests_default" in names


async def test_a_late_partition_takes_its_rows_out_of_the_default_one(db: Connection) -> None:
    """A day without a partition loses nothing, and gets one later."""
    moment = datetime.now(UTC) + timedelta(days=8)
    await db.execute("INSERT INTO requests (id, created_at, status) VALUES ($1, $2, 'queued')", ID, moment)
    assert await db.fetchval("SELECT tableoid::regclass::text FROM requests") == "requests_default"

    await db.execute("SELECT ensure_request_partitions(8)")

    assert await db.fetchval("SELECT tableoid::regclass::text FROM requests") == f"requests_{moment:%Y%m%d}"


async def test_days_ahead_must_make_sense(db: Connection) -> None:
    """A slip of the finger does not make a million tables."""
    with pytest.raises(asyncpg.InvalidParameterValueError, match="0 to 400"):
        await db.execute("SELECT ensure_request_partitions(100000)")


async def test_customer_limits_shows_own_or_the_tiers(db: Connection, acme: str) -> None:
    """The base that the gateways start from."""
    await db.execute("UPDATE customers SET requests_per_second = 5")

    row = await db.fetchrow(
        "SELECT tier, requests_per_second, burst, max_queue_ms, shadow, quotas FROM customer_limits"
    )
    assert tuple(row) == ("paid", 5.0, 1000.0, 2000, False, [])


async def test_customer_limits_shows_every_quota_that_holds(db: Connection, acme: str) -> None:
    """Its own and its tier's, each text once; and whether the tier is only on trial."""
    await db.execute("UPDATE tiers SET shadow = true WHERE name = 'paid'")
    await db.execute(
        "INSERT INTO quotas (customer_id, quota) VALUES ($1::text::uuid, '9/day'), ($1::text::uuid, '7/hour')", acme
    )
    await db.execute(
        "INSERT INTO quotas (tier, quota) VALUES ('paid', '9/day'), ('paid', '99/month'), ('free', '1/day')"
    )

    row = await db.fetchrow("SELECT shadow, quotas FROM customer_limits")
    assert tuple(row) == (True, ["7/hour", "9/day", "99/month"])


async def test_usage_and_slo_views_add_up(db: Connection, acme: str) -> None:
    """Usage by customer and hour; a client that left is no failure of the service."""
    for n, (status, code, http) in enumerate(
        [
            ("completed", None, 200),
            ("completed", None, 200),
            ("failed", "cancelled", 499),
            ("failed", "gpu_timeout", 504),
        ]
    ):
        await db.execute(
            "INSERT INTO requests (id, created_at, customer_id, tier, model, status, error_code, http_status, "
            "latency_ms, tokens_used) VALUES ($1, now(), $2, 'paid', 'tiny', $3, $4, $5, $6, 10)",
            ID[:-1] + str(n),
            acme,
            status,
            code,
            http,
            100.0 * (n + 1),
        )

    usage = await db.fetchrow("SELECT customer, requests, completed, failed, tokens_used FROM usage_hourly")
    slo = await db.fetchrow("SELECT tier, requests, failed, success_ratio, p50_ms FROM tier_slo")
    assert tuple(usage) == ("acme", 4, 2, 2, 40)
    assert tuple(slo) == ("paid", 4, 1, 0.75, 150.0)


@pytest.mark.parametrize("view", ["customer_limits", "usage_hourly", "tier_slo"])
async def test_views_work_on_an_empty_system(db: Connection, view: str) -> None:
    """No division by zero before the first request."""
    assert await db.fetch(f"SELECT * FROM {view}") == []
