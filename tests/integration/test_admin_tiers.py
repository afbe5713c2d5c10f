"""`tierlane tier` and `tierlane model`: what each verb does to its table, and what is said where it is refused."""

import json
from typing import Any

import pytest

from integration.admin_bench import GOLD, Admin, customer
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


@pytest.fixture
def admin(database_url: str) -> Admin:
    return Admin(database_url)


async def test_tiers_are_listed_in_order_of_service(admin: Admin, db: Connection) -> None:
    """With their quotas and how many customers they have; numbers to the right; the same as JSON."""
    await customer(db)
    await admin.done("quota", "set", "--tier", "paid", "10000/day")

    heading, *lines = (await admin.done("tier", "list")).splitlines()
    as_json = await admin.json("tier", "list")

    assert [line.split()[0] for line in lines] == ["enterprise", "paid", "free"]
    assert {line.index(value) + len(value) for line, value in zip(lines, ("5,000", "1,000", "200"), strict=True)} == {
        heading.index("RPS") + 3
    }
    assert [(row["name"], row["customers"], row["quotas"]) for row in as_json] == [
        ("enterprise", 0, []),
        ("paid", 1, ["10000/day"]),
        ("free", 0, []),
    ]


async def test_one_tier_is_explained(admin: Admin) -> None:
    """Every column with its comment from the database."""
    shown = await admin.done("tier", "show", "free")
    as_json = await admin.json("tier", "show", "free")

    assert "Waiting requests of this tier and above that shed it" in shown
    assert (as_json["name"], as_json["shed_depth"], as_json["shadow"]) == ("free", 100, False)


async def test_every_column_of_a_tier_can_be_set(admin: Admin, db: Connection) -> None:
    """Numbers with or without commas, `none` for no limit, on and off; and what it was before is said."""
    said = await admin.done(
        *("tier", "set", "free", "--priority", "9", "--guaranteed-share", "0.15", "--requests-per-second", "1,250.5"),
        *("--burst", "300", "--max-concurrency", "12", "--tokens-per-minute", "none", "--max-queue-depth", "77"),
        *("--max-queue-ms", "900", "--shed-depth", "none", "--shed-wait-ms", "800", "--shadow", "on"),
        *("--paused", "on"),
    )

    row = await db.fetchrow("SELECT * FROM tiers WHERE name = 'free'")
    assert tuple(row) == ("free", 9, 0.15, 1250.5, 300.0, 12, None, 77, 900, None, 800, True, True)
    assert said.splitlines()[0] == "tier free: changed"
    assert "requests_per_second  200 -> 1,250.5" in said
    assert "tokens_per_minute    2,400,000 -> none" in said
    assert "shadow               off -> on" in said
    assert said.endswith("\nGateways apply this within one second.\n")


async def test_what_is_so_already_is_not_written(admin: Admin, db: Connection) -> None:
    """No new version for the gateways, no line in the record."""
    before = await db.fetchval("SELECT version FROM catalog_version")

    assert await admin.done("tier", "set", "free", "--burst", "200") == "tier free: nothing to change\n"
    assert await db.fetchval("SELECT version FROM catalog_version") == before
    assert await db.fetchval("SELECT count(*) FROM config_changes WHERE table_name = 'tiers' AND row_key = 'free'") <= 2


async def test_a_tier_comes_and_goes(admin: Admin, db: Connection) -> None:
    """With defaults where there are some; its quotas go with it and are named."""
    await admin.done("tier", "create", "gold", *GOLD)
    row = await db.fetchrow("SELECT * FROM tiers WHERE name = 'gold'")
    await admin.done("quota", "set", "--tier", "gold", "5/hour")

    said = await admin.done("tier", "delete", "gold")

    assert tuple(row) == ("gold", 4, 0.1, 50.0, 60.0, 7, None, 100, 1500, None, None, False, False)
    assert said.splitlines()[:2] == ["quota 5/hour of tier gold: deleted", "tier gold: deleted"]
    assert await db.fetchval("SELECT count(*) FROM tiers WHERE name = 'gold'") == 0
    assert await db.fetchval("SELECT count(*) FROM quotas") == 0


async def test_a_tier_with_customers_stays(admin: Admin, db: Connection) -> None:
    """The sentence says how many there are."""
    await customer(db, "acme", "free")
    assert "it has 1 customer; " in await admin.fault(1, "tier", "delete", "free")
    await customer(db, "beta", "free")

    assert await admin.fault(1, "tier", "delete", "free") == (
        "Tier free cannot be deleted: it has 2 customers; move them to another tier first."
    )
    assert await db.fetchval("SELECT count(*) FROM tiers") == 3


async def test_the_last_tier_stays(admin: Admin, db: Connection) -> None:
    """Gateways would refuse a catalog without tiers and keep the old one for ever."""
    for name in ("enterprise", "paid"):
        await admin.done("tier", "delete", name)

    assert "it is the last one" in await admin.fault(1, "tier", "delete", "free")
    assert await db.fetchval("SELECT count(*) FROM tiers") == 1


@pytest.mark.parametrize(
    ("exit_code", "arguments", "said"),
    [
        (
            2,
            ["set", "free", "--burst", "0.5"],
            "burst must be 1 to 10,000,000, not 0.5 (default bucket size of each customer, requests).",
        ),
        (2, ["set", "free", "--burst", "nan"], "burst must be 1 to 10,000,000, not nan ("),
        (
            2,
            ["set", "free", "--requests-per-second", "-1"],
            "requests_per_second must be above 0 and at most 1,000,000",
        ),
        (2, ["set", "free", "--tokens-per-minute", "0"], "tokens_per_minute must be above 0, not 0 ("),
        (
            2,
            ["set", "free", "--tokens-per-minute", "9" * 30],
            "tokens_per_minute must be below 9,223,372,036,854,775,808",
        ),
        (
            2,
            ["set", "free", "--priority", "40000"],
            "priority must be 1 to 1,000, not 40,000 (order of service, 1 first",
        ),
        (2, ["set", "free", "--max-queue-ms", "99999999999"], "max_queue_ms must be 1 to 60,000, not 99,999,999,999"),
        (2, ["set", "free", "--burst", "lots"], "--burst: must be a number, got 'lots' (default bucket size of each"),
        (2, ["set", "free", "--max-concurrency", "1.5"], "--max-concurrency: must be a whole number, got '1.5' ("),
        (2, ["set", "free", "--shed-depth", "no"], "--shed-depth: must be a whole number or none, got 'no' ("),
        (2, ["set", "free", "--burst", "none"], "--burst: must be a number, got 'none' ("),
        (2, ["set", "free", "--shadow", "maybe"], "--shadow: must be on or off, got 'maybe' ("),
        (2, ["set", "free"], "Specify at least one column: --priority, --guaranteed-share, "),
        (2, ["create", "gold", "--priority", "4"], "Required: --guaranteed-share, --requests-per-second, "),
        (2, ["create", "Gold!", *GOLD], "name must begin with a letter from a to z and go on with at most 62 of"),
        (2, ["create", "go\udcffld", *GOLD], "'go\\udcffld' is not text in UTF-8"),
        (1, ["create", "free", *GOLD], "There is already a tier named free."),
        (1, ["set", "free", "--priority", "1"], "priority 1 is that of another tier."),
        (
            1,
            ["set", "free", "--guaranteed-share", "0.9"],
            "The guaranteed shares of all tiers add up to 1.2000, more than",
        ),
        (1, ["set", "gold", "--burst", "3"], "There is no tier named gold."),
        (1, ["show", "go\x1b[2Jld"], "There is no tier named go\\x1b[2Jld."),
        (1, ["delete", "gold"], "There is no tier named gold."),
    ],
)
async def test_a_fault_is_one_sentence(admin: Admin, exit_code: int, arguments: list[str], said: str) -> None:
    """It names the field and the fault; 2 for what can never be right, 1 for what cannot be done now."""
    assert (await admin.fault(exit_code, "tier", *arguments)).startswith(said)


async def test_models_come_and_go(admin: Admin, db: Connection) -> None:
    """The table's defaults where nothing was given; each column can be set; an empty list says so."""
    assert await admin.done("model", "list") == "No models.\n"
    assert await admin.json("model", "list") == []
    await admin.done("model", "create", "tiny", "--max-batch-size", "8")
    made = tuple(await db.fetchrow("SELECT * FROM models"))
    await admin.done(
        *("model", "set", "tiny", "--pool", "big", "--max-batch-size", "64", "--max-batch-tokens", "9000"),
        *("--max-wait-ms", "5", "--gpu-timeout-ms", "700", "--rps-per-gpu", "12.5", "--target-utilization", "0.7"),
        *("--cache-ttl-s", "60", "--cache-scope", "global", "--enabled", "off"),
        *("--rps-per-gpu-fixed", "on"),
    )
    after = tuple(await db.fetchrow("SELECT * FROM models"))
    listed = await admin.done("model", "list")
    await admin.done("model", "set", "tiny", "--max-batch-tokens", "none", "--enabled", "on")

    assert made == ("tiny", "default", 8, None, 40, 3000, 100.0, 0.8, 0, True, "customer", False)
    assert after == ("tiny", "big", 64, 9000, 5, 700, 12.5, 0.7, 60, False, "global", True)
    columns = ["tiny", "off", "big", "64", "9,000", "5", "700", "12.5", "on", "0.7", "60", "global"]
    assert listed.splitlines()[1].split() == columns
    assert json.loads(await admin.done("model", "show", "tiny", "-o", "json"))["max_batch_tokens"] is None
    assert "The worker pool that runs it." in await admin.done("model", "show", "tiny")
    assert (await admin.done("model", "delete", "tiny")).startswith("model tiny: deleted\n")
    assert await admin.fault(1, "model", "delete", "tiny") == "There is no model named tiny."
    assert await db.fetchval("SELECT count(*) FROM models") == 0
