"""`tierlane export` and `tierlane apply`: the catalog as a file, on the test's own PostgreSQL."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.admin_fixtures import Admin, customer
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.admin.errors import rule_in_words
from ledger.catalog.loader import load

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
TABLES = ("cells", "models", "prices", "tiers", "customers", "quotas", "api_keys", "config_changes", "catalog_version")
NAME_RULE = rule_in_words("models", "ck_models_name")
EVERY_KIND = """
INSERT INTO cells (name, redis_url, state, weight) VALUES
    ('default', NULL, 'open', 1), ('c2', 'redis://two.internal:6379/0', 'draining', 0.5), ('c3', NULL, 'closed', 1);
INSERT INTO models (name) VALUES ('tiny');
INSERT INTO models (name, pool, max_batch_size, max_batch_tokens, max_wait_ms, rps_per_gpu, rps_per_gpu_fixed,
                    target_utilization, cache_ttl_s, cache_scope, enabled, capabilities, tpot_ms)
    VALUES ('org/big:2', 'big', 8, 4096, 5, 12.5, true, 0.75, 60, 'global', false, 'text', 33.3);
INSERT INTO prices VALUES ('tiny', '2026-01-02 03:04:05.678901+00', 0.1234567890123456789, 0), ('tiny', '2027-01-01', 1, 2.5);
INSERT INTO prices VALUES ('deleted', '2025-01-01', 3, 0);
UPDATE tiers SET slo_ms = 800, slo_success = 0.999, paused = true, shadow = true, interactive_jobs = true WHERE name = 'paid';
INSERT INTO customers (name, tier) VALUES ('acme', 'free'), ('Zoë "Q" #1: {x}', 'paid'), ('null', 'paid'), ('5', 'free');
INSERT INTO customers (name, tier, status, requests_per_second, burst, max_queue_ms, callback_hosts, weight, cell, spread)
    VALUES ('whole', 'enterprise', 'suspended', 0.1, 3e6, 70, 'a.example, *.b.example:8443', 2.5, 'default', 4),
           ('no hosts', 'free', 'active', NULL, 1, NULL, '', 1, NULL, 1);
INSERT INTO quotas (tier, quota) VALUES ('free', '10000/day'), ('free', '5 usd per 2 weeks');
INSERT INTO quotas (customer_id, quota) SELECT id, quota FROM customers, unnest(ARRAY['5/day', '6 per day', '0.5 gpu-h/month'])
    AS quota WHERE name = 'acme';
INSERT INTO cordons (worker) VALUES ('w1');
SELECT issue_api_key('acme', 'ci');
"""


@pytest.fixture
async def admin(database_url: str, db: Connection) -> Admin:
    return Admin(database_url)


async def tables(db: Connection, *names: str) -> dict[str, list[tuple[Any, ...]]]:
    """Every row."""
    return {
        name: [tuple(row) for row in await db.fetch(f"SELECT * FROM {name} ORDER BY 1, 2")] for name in names or TABLES
    }


async def apply(admin: Admin, text: str, *options: str, exit_code: int = 0) -> str:
    """Apply a text; what is printed, to standard error if it failed."""
    result = await admin.run("apply", "-f", "-", *options, input=text)
    assert result.exit_code == exit_code, (result.stdout, result.stderr)
    return str(result.stderr if exit_code == 1 else result.stdout)


async def test_an_exported_catalog_changes_nothing(admin: Admin, db: Connection) -> None:
    """Of every kind of row, odd names and values that only SQL can make among them; --prune has nothing to delete."""
    await db.execute(EVERY_KIND)
    before = await tables(db)
    text = await admin.done("export")

    for options in ([], ["--prune"], ["--dry-run"], ["--prune", "--dry-run"]):
        assert (await apply(admin, text, *options)).startswith("The catalog is that of the file: nothing to change.\n")
    assert await tables(db) == before
    assert await admin.done("export") == text
    assert [word for word in ("w1", "secret", "api_key", "created_at", "ci:") if word in text] == []


async def test_an_exported_catalog_makes_another_database_the_same(admin: Admin, db: Connection) -> None:
    """All but ids, keys and cordons; the file is that of the other one then."""
    empty = await admin.done("export")
    await db.execute(EVERY_KIND)
    text = await admin.done("export")
    await db.execute(
        "DELETE FROM customers; DELETE FROM cells; DELETE FROM models; DELETE FROM prices; DELETE FROM quotas"
    )
    await apply(admin, empty)
    lost = await admin.done("export")

    printed = await apply(admin, text, "--actor", "ann")
    again = await apply(admin, text)

    assert lost != text == await admin.done("export")
    assert "The price of deleted is of earlier requests only: there is no such model." in printed
    assert again.startswith("The catalog is that of the file: nothing to change.\n")
    assert (await load(db)).customers
    await apply(admin, empty, "--prune")
    left = (await admin.done("export")).replace("    paused: true\n", "")
    assert left.partition("models:")[2] == empty.partition("models:")[2]


CHANGE = """
tiers:
  free: {priority: 2, guaranteed_share: 0.2, requests_per_second: 200, burst: 300, max_concurrency: 100, max_queue_depth: 50}
  paid: {priority: 3, guaranteed_share: 0.1, requests_per_second: 900, burst: 900, max_concurrency: 9, max_queue_depth: 90}
  gold: {priority: 9, guaranteed_share: 0.6, requests_per_second: 1, burst: 1, max_concurrency: 1, max_queue_depth: 1}
customers:
  acme: {tier: gold, quotas: [6/day]}
  beta: {tier: free, burst: 7}
models:
  tiny: {max_batch_size: 16}
prices:
  tiny: [{valid_from: 2026-01-01, usd_per_gpu_s: 0.5}]
"""


async def test_a_dry_run_prints_the_plan_and_does_not_make_it(admin: Admin, db: Connection) -> None:
    """Field by field, with exit code 2; the real run makes the same changes under one actor, and a second run none."""
    await customer(db)
    await admin.done("quota", "set", "acme", "5/day")
    before = await tables(db)
    plan = await apply(admin, CHANGE, "--dry-run", exit_code=2)
    unchanged = await tables(db)
    since = await db.fetchval("SELECT max(id) FROM config_changes")
    done = await admin.run("apply", "-f", "-", "-o", "json", "--actor", "ann", input=CHANGE)
    recorded = await db.fetch("SELECT changed_by, xact, table_name FROM config_changes WHERE id > $1", since)

    assert unchanged == before
    assert "tier paid: would be changed\n  priority             2 -> 3\n  guaranteed_share     0.25 -> 0.1\n" in plan
    assert "tier gold: would be created\n" in plan
    assert "customer acme: would be changed\n  tier  paid -> gold\n" in plan
    assert "quota 6/day of acme: would be changed\n  quota  5/day -> 6/day\n" in plan
    assert plan.endswith("Dry run: nothing was changed.\n")
    document = json.loads(done.stdout)
    assert [(each["thing"], each["name"], each["old"] is None) for each in document["changes"]] == [
        ("model", "tiny", True),
        ("tier", "gold", True),
        ("tier", "free", False),
        ("tier", "paid", False),
        ("customer", "beta", True),
        ("customer", "acme", False),
        ("quota", "6/day of acme", False),
        ("price", "of tiny from 2026-01-01 00:00:00 UTC on", True),
    ]
    assert {(row["changed_by"], row["xact"]) for row in recorded} == {("ann", recorded[0]["xact"])}
    assert len(recorded) == len(document["changes"])
    assert "Not in the file, and kept: 1 tier; --prune deletes them." in document["notes"]
    assert "nothing to change" in await apply(admin, CHANGE, "--dry-run")


async def test_all_faults_are_printed_and_nothing_is_applied(admin: Admin, db: Connection, tmp_path: Path) -> None:
    """Of the file, of single rows by the rules of their tables, and of the whole, each with line and column."""
    before = await tables(db)
    file = tmp_path / "catalog.yaml"
    file.write_text(
        "customers:\n"
        "  acme: {tier: free}\n"
        "  beta:\n"
        "    tier: gold\n"
        "    burst: 0\n"
        "    spread: many\n"
        "    bursts: 5\n"
        "    max_queue_ms: 99999999999\n"
        "    quotas: [often]\n"
        "models:\n"
        "  -bad: {}\n"
        "prices:\n"
        "  tiny:\n"
        "    - {valid_from: 2026-01-01, usd_per_gpu_s: 1}\n"
        "    - {valid_from: 2026-02-01, usd_per_gpu_s: -1}\n"
    )
    for options in ([], ["--dry-run"], ["--prune"]):
        result = await admin.run("apply", "-f", str(file), *options)
        lines = [line.removeprefix(f"{file}:") for line in result.stderr.splitlines()]

        assert (result.exit_code, result.stdout) == (1, "")
        assert [line.partition(" (")[0] for line in lines] == [
            "4:11: customers.beta: There is no tier named gold; there are enterprise, paid, free.",
            "5:12: customers.beta: burst must be 1 to 10,000,000, not 0",
            "6:13: customers.beta.spread: must be a whole number, got 'many'",
            f"7:5: customers.beta.bursts is unknown; there are {lines[3].partition('there are ')[2]}",
            "8:19: customers.beta: max_queue_ms must be 1 to 3,600,000, not 99,999,999,999",
            "9:14: customers.beta.quotas: quota must be an amount and a period, not 'often'",
            f"11:3: models.-bad: name {NAME_RULE}, not '-bad'",
            "15:47: price of tiny from 2026-02-01 00:00:00 UTC on: usd_per_gpu_s must be 0 to 1,000,000, not -1",
        ]
    assert await tables(db) == before


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (CHANGE.replace("0.6", "0.9"), "The guaranteed shares of all tiers add up to 1.2500, more than 1."),
        (
            CHANGE.replace("priority: 9", "priority: 3"),
            "standard input:5:20: tiers.gold: priority 3 is that of tier paid, too.",
        ),
    ],
)
async def test_it_is_applied_as_a_whole_or_not_at_all(admin: Admin, db: Connection, text: str, line: str) -> None:
    """A rule between rows holds at the end of all changes, and undoes all of them."""
    before = await tables(db)

    assert await apply(admin, text, exit_code=1) == f"{line}\n"
    assert await tables(db) == before


async def test_rows_are_deleted_only_with_prune(admin: Admin, db: Connection) -> None:
    """With it in the sections of the file; a customer with its keys. Cells are kept."""
    await db.execute(EVERY_KIND)
    text = "customers: {acme: {tier: free, quotas: [5/day]}}\nmodels: {tiny: {}}\ncells: {}"
    kept = await apply(admin, text)
    rows = await tables(db, "customers", "quotas", "models", "cells", "tiers", "prices")
    plan = await apply(admin, "customers: {}", "--prune", "--dry-run", exit_code=2)
    await apply(admin, text, "--prune")

    note = "Not in the file, and kept: 1 model, 5 customers, 2 quotas; --prune deletes them."
    assert note in kept
    assert "Not in the file, and kept: cell c2, c3, default; `tierlane cell close` closes a cell." in kept
    assert {name: len(found) for name, found in rows.items()} == {
        "customers": 6,
        "quotas": 5,
        "models": 2,
        "cells": 3,
        "tiers": 3,
        "prices": 3,
    }
    assert "customer acme: would be deleted" in plan
    assert "Deleted with their customers: 1 key." in plan
    assert [row["name"] for row in await db.fetch("SELECT name FROM customers")] == ["acme"]
    assert await db.fetchval("SELECT string_agg(quota, ' ') FROM quotas WHERE customer_id IS NOT NULL") == "5/day"
    assert await db.fetchval("SELECT count(*) FROM cells") == 3
    assert await apply(admin, "tiers: {}", "--prune", exit_code=1) == (
        "standard input:1:8: There must be a tier: every customer needs one.\n"
        "standard input:1:8: tiers.free: Tier free cannot be deleted: it has 1 customer.\n"
    )


async def test_what_is_changed_in_operation_stays(admin: Admin, db: Connection) -> None:
    """A suspension, a pause and a draining cell, unless the file has them."""
    await db.execute("INSERT INTO cells (name) VALUES ('default'), ('c2')")
    await customer(db)
    text = await admin.done("export")
    await admin.done("customer", "suspend", "acme")
    await db.execute("UPDATE tiers SET paused = true WHERE name = 'free'")
    await db.execute("UPDATE cells SET state = 'draining' WHERE name = 'c2'")

    assert "nothing to change" in await apply(admin, text)
    explicit = "customers: {acme: {tier: paid, status: active}}\ncells: {c2: {state: open}}"
    plan = await apply(admin, explicit, "--dry-run", exit_code=2)
    assert "customer acme: would be changed\n  status  suspended -> active\n" in plan
    assert "cell c2: would be changed\n  state  draining -> open\n" in plan


async def test_a_concurrent_change_waits_or_is_named(admin: Admin, db: Connection, tmp_path: Path) -> None:
    """An open transaction is named after the wait, and nothing is applied; two runs at once come one after the other."""
    await customer(db)
    async with db.transaction():
        await db.execute("UPDATE customers SET weight = 2")
        fault = await apply(admin, "customers: {acme: {tier: free}}", exit_code=1)
    for name, values in (("one", "tier: free, burst: 5"), ("two", "tier: paid, burst: 6")):
        (tmp_path / name).write_text(f"customers: {{acme: {{{values}}}}}")
    environment = os.environ | {"TIERLANE_DATABASE_URL": admin.database_url}
    command = [sys.executable, "-m", "tierlane", "apply", "-f"]
    runs = [
        await asyncio.create_subprocess_exec(
            *command, str(tmp_path / name), env=environment, stdout=asyncio.subprocess.DEVNULL
        )
        for name in ("one", "two")
    ]
    codes = [await run.wait() for run in runs]
    rows = await db.fetch("SELECT tier, burst, weight FROM customers")

    assert codes == [0, 0]
    assert fault.startswith("An open transaction holds a lock that this change needs (pid ")
    assert [tuple(row) for row in rows] in ([("free", 5.0, 1.0)], [("paid", 6.0, 1.0)])


async def test_many_rows_take_few_statements(admin: Admin, db: Connection) -> None:
    """Each statement counts the version of the catalog up: their number does not depend on that of the rows."""
    names = [f"customer-{number:04}" for number in range(1500)]
    text = "customers:\n" + "".join(f"  {name}: {{tier: free, quotas: [5/day]}}\n" for name in names)
    version = "SELECT version FROM catalog_version"
    first = await db.fetchval(version)
    await apply(admin, text)
    created = await db.fetchval(version)
    await apply(admin, text.replace("5/day", "6/day").replace("free", "paid"))
    changed = await db.fetchval(version)

    assert (created - first, changed - created) == (2, 2)
    await apply(admin, "customers: {}", "--prune")
    assert await db.fetchval("SELECT count(*) FROM customers") == 0


async def test_an_error_of_the_file_is_one_line(admin: Admin, tmp_path: Path) -> None:
    assert (
        await admin.fault(1, "apply", "-f", str(tmp_path / "none"))
        == f"{tmp_path / 'none'} cannot be read: No such file or directory."
    )
    assert (await admin.fault(1, "apply", "-f", str(tmp_path))).endswith("cannot be read: Is a directory.")
