"""The verbs of customers, quotas, API keys, tiers and models: changes, dry run, actor, and errors."""

import getpass
import json
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from gateway.host_lists import CallbackHosts, host_list
from integration.admin_fixtures import Admin, acme, admin, customer
from integration.ledger_fixtures import database_url, db, dsn, postgres_server
from ledger.admin.changes import changing
from ledger.catalog.loader import load

__all__ = ["acme", "admin", "database_url", "db", "postgres_server"]

Connection = Any
CATALOG = ("tiers", "customers", "api_keys", "quotas", "models", "prices", "config_changes", "catalog_version")
LAST_ACTOR = "SELECT changed_by FROM config_changes ORDER BY id DESC LIMIT 1"
GOLD = (
    *("--priority", "4", "--guaranteed-share", "0.1", "--requests-per-second", "50", "--burst", "60"),
    *("--max-concurrency", "7", "--max-queue-depth", "100", "--max-queue-ms", "1500"),
)
"""The required options of a new tier."""
HOUR, DAY = 3600.0, 86_400.0


async def tables(db: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of the catalog."""
    return {name: [tuple(row) for row in await db.fetch(f"SELECT * FROM {name} ORDER BY 1")] for name in CATALOG}


def columns_of(document: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Each change as its kind of row and the columns that it changes."""
    changes = [(each["thing"], each["old"] or {}, each["new"] or {}) for each in document["changes"]]
    return [(thing, sorted(c for c in {**old, **new} if old.get(c) != new.get(c))) for thing, old, new in changes]


@pytest.mark.parametrize(
    "arguments",
    [
        ["tier", "set", "free", "--burst", "300"],
        ["tier", "create", "gold", *GOLD],
        ["tier", "delete", "free"],
        ["customer", "create", "beta", "--tier", "free"],
        ["customer", "set", "acme", "--burst", "300"],
        ["customer", "suspend", "acme"],
        ["customer", "delete", "acme", "--yes"],
        ["key", "create", "acme", "ci"],
        ["key", "set", "<key>", "--models", "tiny"],
        ["key", "rotate", "<key>"],
        ["key", "revoke", "<key>"],
        ["model", "create", "big"],
        ["model", "set", "tiny", "--enabled", "off"],
        ["model", "delete", "tiny"],
        ["quota", "set", "acme", "2/day"],
        ["quota", "set", "--tier", "free", "2/day"],
        ["quota", "remove", "acme", "1/day"],
        ["price", "set", "tiny", "--usd-per-gpu-s", "2"],
        ["price", "set", "tiny", "--usd-per-gpu-s", "2", "--from", "2026-01-01"],
        ["price", "remove", "tiny", "2026-01-01"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
async def test_a_dry_run_shows_the_change_and_does_not_make_it(
    admin: Admin, db: Connection, arguments: list[str]
) -> None:
    """A dry run leaves every table as it was and issues no key; the real run makes the change that was shown."""
    await admin.done("model", "create", "tiny")
    await admin.done("quota", "set", "acme", "1/day")
    await admin.done("quota", "set", "--tier", "free", "5/hour")  # It is deleted with its tier.
    await admin.done("price", "set", "tiny", "--usd-per-gpu-s", "1", "--from", "2026-01-01")
    key = (await admin.json("key", "create", "acme", "ci"))["key"]
    words = [word.replace("<key>", key[3:15]) for word in arguments]
    before = await tables(db)

    text = await admin.done(*words, "--dry-run")
    dry = await admin.json(*words, "--dry-run")
    after = await tables(db)
    real = await admin.json(*words)

    assert after == before != await tables(db)
    assert text.splitlines()[-1] == "Dry run: nothing was changed."
    assert ": would be " in text.splitlines()[0]
    assert "\ntl_" not in text
    assert (dry["dry_run"], real["dry_run"], dry.get("key")) == (True, False, None)
    assert columns_of(dry) == columns_of(real) != []


async def test_a_dry_run_reports_what_the_database_rejects(admin: Admin) -> None:
    """A violated CHECK, trigger or unique key fails the dry run as it fails the real run."""
    for words in (
        ["tier", "set", "free", "--burst", "0"],
        ["tier", "set", "free", "--guaranteed-share", "0.9"],
        ["customer", "create", "acme", "--tier", "free"],
    ):
        real, dry = await admin.run(*words), await admin.run(*words, "--dry-run")
        assert real.exit_code > 0
        assert (dry.exit_code, dry.stderr) == (real.exit_code, real.stderr)


@pytest.mark.parametrize(
    ("env", "options", "actor"),
    [
        ({"USER": "", "LOGNAME": "ann"}, (), "ann"),
        ({}, (), getpass.getuser()),
        ({"TIERLANE_ACTOR": "night shift"}, (), "night shift"),
        ({"TIERLANE_ACTOR": "night shift"}, ("--actor", "Zoë O'Hara"), "Zoë O'Hara"),
    ],
)
async def test_a_change_is_recorded_with_its_actor(
    admin: Admin, db: Connection, env: dict[str, str], options: tuple[str, ...], actor: str
) -> None:
    """The actor is the option, else the variable, else the user of this machine."""
    await admin.done("customer", "suspend", "acme", *options, env=env)

    assert await db.fetchval(LAST_ACTOR) == actor


async def test_config_changes_show_who_changed_what(admin: Admin, db: Connection) -> None:
    """The newest first, by age, table, actor or customer; a deleted customer is found with its keys and quotas."""
    await admin.done("tier", "set", "free", "--burst", "300", "--actor", "ann")
    await admin.done("quota", "set", "acme", "5/day", "--actor", "bob")
    await admin.done("key", "create", "acme", "ci", "--actor", "bob")
    await admin.done("customer", "set", "acme", "--tier", "free", "--actor", "bob")
    await db.execute("UPDATE config_changes SET changed_at = now() - interval '2 days' WHERE table_name = 'quotas'")

    async def things(*arguments: str) -> list[str]:
        return [change["table_name"] for change in await admin.json("config-changes", *arguments)]

    text = (await admin.run("config-changes", "--table", "tiers", "--limit", "1")).stdout
    assert text.splitlines()[1].split("UTC")[1].split() == ["ann", "tier", "free", "burst", "200", "->", "300"]
    assert await things("--by", "bob") == ["customers", "api_keys", "quotas"]
    assert await things("--by", "bob", "--since", "1d") == ["customers", "api_keys"]
    newest = (await admin.json("config-changes", "acme"))[0]
    assert (newest["old"]["tier"], newest["new"]["tier"], newest["changed_by"]) == ("paid", "free", "bob")
    await admin.done("customer", "delete", "acme", "--yes", "--actor", "bob")
    assert (await things("acme"))[-4:] == ["customers", "api_keys", "quotas", "customers"]
    assert "secret_hash" not in await admin.done("config-changes", "-o", "json")
    assert await admin.fault(1, "config-changes", "nobody") == "There is no customer named nobody."


@pytest.mark.parametrize("actor", ["  ", "a\nb", "x" * 201])
async def test_an_invalid_actor_is_rejected(admin: Admin, db: Connection, actor: str) -> None:
    """Blank, unprintable and long names exit with code 2 and change nothing."""
    assert (await admin.fault(2, "customer", "suspend", "acme", "--actor", actor)).startswith("--actor: must be a name")
    assert await db.fetchval("SELECT status FROM customers") == "active"


async def test_the_actor_ends_with_its_transaction(db: Connection) -> None:
    """A pooled session does not record the next change under the same actor."""
    async with changing(db, "ann", dry_run=False):
        assert await db.fetchval("SELECT current_setting('tierlane.actor')") == "ann"

    assert await db.fetchval("SELECT current_setting('tierlane.actor', true)") == ""


async def test_an_unavailable_postgresql_is_one_line_without_its_password() -> None:
    """The error names the server and exits with code 1."""
    line = await Admin("postgresql+asyncpg://user:hunter2@/lane?host=/nonexistent").fault(1, "tier", "list")

    assert line.startswith("PostgreSQL at ")
    assert "hunter2" not in line


async def test_an_old_schema_is_reported_with_the_command_to_run(admin: Admin, db: Connection) -> None:
    """A missing column is reported as a missing migration."""
    await db.execute("ALTER TABLE tiers DROP COLUMN shadow CASCADE")

    assert (await admin.fault(1, "tier", "list")).endswith("run `tierlane migrate`.")


async def test_the_local_stack_is_the_default(admin: Admin, database_url: str, tmp_path: Path) -> None:
    """Without settings the verbs use stack.json; settings of half a stack are not completed from it."""
    stack = {"redis_url": "unix:///nonexistent", "database_url": database_url, "service_token": "t" * 16}
    (tmp_path / "stack.json").write_text(json.dumps(stack))
    local, env = Admin(""), {"TIERLANE_DATA_DIR": str(tmp_path)}

    assert "acme" in await local.done("customer", "list", "--data-dir", str(tmp_path))
    assert "acme" in await local.done("customer", "list", env=env)
    assert "no local stack runs in /nonexistent" in await local.fault(2, "customer", "list")
    mixed = await local.run("dlq", "list", env=env | {"TIERLANE_REDIS_URL": "unix:///elsewhere"})
    (tmp_path / "stack.json").write_text("{")
    for refused in (mixed, await local.run("dlq", "list", env=env)):
        assert refused.exit_code == 2
        assert refused.stderr.startswith("TIERLANE_DATABASE_URL: is not set, and no local stack runs in ")


async def test_an_open_transaction_that_blocks_a_change_is_named(
    admin: Admin, db: Connection, database_url: str
) -> None:
    """A change that waits for a lock fails after seconds, names the session that holds it, and changes nothing."""
    holder = await asyncpg.connect(dsn(database_url), server_settings={"application_name": "psql of bob"})
    try:
        await holder.execute("BEGIN")
        await holder.execute("UPDATE tiers SET burst = burst + 1 WHERE name = 'paid'")
        pid = holder.get_server_pid()
        for tier in ("paid", "free"):  # The same row, and another row of the same trigger.
            line = await admin.fault(1, "tier", "set", tier, "--burst", "7")
            for part in (f"pid {pid}, user ", "application psql of bob, ", f"`SELECT pg_terminate_backend({pid})`"):
                assert part in line
    finally:
        await holder.close()

    assert await db.fetchval("SELECT count(*) FROM tiers WHERE burst = 7") == 0


async def test_tiers_that_are_needed_cannot_be_deleted(admin: Admin, db: Connection) -> None:
    """A tier with customers and the last tier are kept: gateways would reject a catalog without tiers."""
    assert "it has 1 customer; " in await admin.fault(1, "tier", "delete", "paid")
    await admin.done("customer", "delete", "acme", "--yes")
    for name in ("enterprise", "paid"):
        await admin.done("tier", "delete", name)

    assert "it is the last one" in await admin.fault(1, "tier", "delete", "free")
    assert await db.fetchval("SELECT count(*) FROM tiers") == 1


async def test_a_customer_is_created_and_changed(admin: Admin, db: Connection, acme: str) -> None:
    """A customer has its own limits where given, and the tier's again after `none`; it is found by name or id."""
    await admin.done("customer", "create", "Beta & Co", "--tier", "free", "--burst", "50")
    read = (
        "SELECT id::text, tier, status, requests_per_second, burst, tokens_per_minute FROM customers WHERE name ~ 'Co'"
    )
    created = tuple(await db.fetchrow(read))
    await admin.done("customer", "set", created[0].upper(), "--tier", "paid", "--tokens-per-minute", "6,000")
    await admin.done("customer", "set", "Beta & Co", "--burst", "none")

    assert created[1:] == ("free", "active", None, 50.0, None)
    assert tuple(await db.fetchrow(read))[1:] == ("paid", "active", None, None, 6000)
    await admin.done("customer", "suspend", "acme")
    assert (await load(db)).customers[acme].suspended
    assert await admin.done("customer", "suspend", "acme") == "customer acme: nothing to change\n"
    await admin.done("customer", "activate", "acme")
    assert not (await load(db)).customers[acme].suspended


async def test_rows_are_listed(admin: Admin, db: Connection) -> None:
    """Tiers by priority, customers by name, the newest keys first; filtered, and cut with the total."""
    await customer(db, "beta", "free")
    for owner, name in (("acme", "first"), ("beta", "second"), ("acme", "third")):
        await admin.done("key", "create", owner, name)
    await db.execute(
        "UPDATE api_keys SET created_at = now() - interval '2 h', expires_at = now() - interval '1 h' WHERE name = 'first'"
    )
    await admin.done("customer", "suspend", "beta")
    await admin.done("quota", "set", "--tier", "paid", "10000/day")

    async def rows(fields: str, *words: str) -> list[tuple[Any, ...]]:
        return [tuple(row[field] for field in fields.split()) for row in await admin.json(*words)]

    assert await admin.json("model", "list") == []
    assert await rows("name customers quotas", "tier", "list") == [
        ("enterprise", 0, []), ("paid", 1, ["10000/day"]), ("free", 1, []),
    ]  # fmt: skip
    assert await rows("name live_keys", "customer", "list") == [("acme", 1), ("beta", 1)]
    assert await rows("name", "customer", "list", "--tier", "free", "--status", "suspended") == [("beta",)]
    assert await rows("name", "customer", "list", "--tier", "paid", "--status", "suspended") == []
    assert await rows("name customer state", "key", "list") == [
        ("third", "acme", "live"), ("second", "beta", "suspended"), ("first", "acme", "expired"),
    ]  # fmt: skip
    ((expired,),) = (await rows("id", "key", "list", "acme"))[1:]
    assert "expired" in await admin.fault(1, "key", "rotate", expired)
    cut = await admin.run("key", "list", "--limit", "1")
    assert ("third" in cut.stdout, cut.stderr) == (True, "1 of 3 keys; --limit N shows more.\n")
    assert "Waiting requests of this tier and above that shed it" in await admin.done("tier", "show", "free")


async def test_a_customer_is_shown_with_limits_quotas_and_keys(admin: Admin) -> None:
    """Each limit and quota is shown with its source, the customer or the tier."""
    await admin.done("customer", "set", "acme", "--burst", "50")
    await admin.done("quota", "set", "acme", "10000/day")
    await admin.done("quota", "set", "--tier", "paid", "100000/month")
    await admin.done("key", "create", "acme", "nightly")

    shown = [line.split() for line in (await admin.done("customer", "show", "acme")).splitlines()]
    document = await admin.json("customer", "show", "acme")

    assert ["burst", "50", "own"] in shown
    assert ["100000/month", "tier", "paid"] in shown
    limits = {(limit["limit"], limit["source"]) for limit in document["limits"]}
    assert limits >= {("burst", "own"), ("max_queue_ms", "tier paid")}
    assert [quota["quota"] for quota in document["quotas"]] == ["100000/month", "10000/day"]
    assert [key["name"] for key in document["keys"]] == ["nightly"]
    assert "secret_hash" not in str(document)


async def test_deleting_a_customer_needs_a_confirmation(admin: Admin, db: Connection) -> None:
    """The question names the keys and quotas that are deleted with it; no answer and `n` change nothing."""
    await admin.done("key", "create", "acme", "ci")
    for answer in ("", "n\n"):
        refused = await admin.run("customer", "delete", "acme", input=answer)
        assert refused.exit_code == 1
        assert "Delete customer acme with 1 key and 0 quotas?" in refused.stdout
    assert await db.fetchval("SELECT count(*) FROM customers") == 1

    assert (await admin.run("customer", "delete", "acme", input="y\n")).exit_code == 0
    assert await db.fetchval("SELECT (SELECT count(*) FROM customers) + (SELECT count(*) FROM api_keys)") == 0


async def test_a_quota_replaces_the_quota_of_the_same_period(admin: Admin, db: Connection, acme: str) -> None:
    """The same period in another form is the same row, so its use is kept; duplicates are replaced together."""
    await admin.done("quota", "set", "acme", "10000/day")
    first = await db.fetchval("SELECT id FROM quotas")
    await admin.done("quota", "set", "acme", "500/hour")
    await admin.done("quota", "set", "acme", "20000 per 1 day")

    assert (await load(db)).customers[acme].quotas == (("1hour", 500), ("1day", 20000))
    assert await db.fetchval("SELECT id FROM quotas WHERE quota = '20000 per 1 day'") == first
    await db.execute("INSERT INTO quotas (customer_id, quota) VALUES ($1, '7/day')", acme)
    await admin.done("quota", "set", "acme", "8/day")
    assert (await load(db)).customers[acme].quotas == (("1hour", 500), ("1day", 8))
    assert await db.fetchval("SELECT count(*) FROM quotas") == 2


async def test_the_limit_of_auxiliary_requests_is_set(admin: Admin, db: Connection) -> None:
    """Of a tier; `none` is the limit of other requests."""

    async def limits() -> tuple[float | None, float | None]:
        tier = (await load(db)).tier("free")
        return tier.auxiliary_rate, tier.auxiliary_burst

    assert await limits() == (None, None)
    await admin.done("tier", "set", "free", "--auxiliary-requests-per-second", "2.5", "--auxiliary-burst", "40")
    assert await limits() == (2.5, 40.0)
    await admin.done("tier", "set", "free", "--auxiliary-requests-per-second", "none")
    assert await limits() == (None, 40.0)
    assert "auxiliary_burst" in await admin.fault(2, "tier", "set", "free", "--auxiliary-burst", "0.5")


async def test_a_week_is_not_seven_days(admin: Admin, db: Connection, acme: str) -> None:
    """Both are quotas of their own; the one in days says on which day it begins, and an unknown unit which there are."""
    assert "Thursday" not in await admin.done("quota", "set", "acme", "1000/week")
    assert "Thursday" in await admin.done("quota", "set", "acme", "900 per 7 days", "--dry-run")
    await admin.done("quota", "set", "acme", "900 per 7 days")
    assert (await load(db)).customers[acme].quotas == (("1week", 1000), ("7day", 900))

    await admin.done("quota", "remove", "acme", "week")
    assert (await load(db)).customers[acme].quotas == (("7day", 900),)
    assert "second, minute, hour, day, week, month, year" in await admin.fault(2, "quota", "set", "acme", "1/fortnight")


async def test_quotas_are_listed_and_removed(admin: Admin, db: Connection) -> None:
    """A quota is removed by its text or its period; the quotas of a customer include those of its tier."""
    await customer(db, "beta", "free")
    for words in (["acme", "1/day"], ["acme", "2/month"], ["beta", "3/day"], ["--tier", "paid", "4/hour"]):
        await admin.done("quota", "set", *words)

    async def quotas(*options: str) -> list[str]:
        return [row["quota"] for row in await admin.json("quota", "list", *options)]

    assert await quotas() == ["4/hour", "1/day", "2/month", "3/day"]
    assert await quotas("--customer", "acme") == ["4/hour", "1/day", "2/month"]
    assert await quotas("--tier", "paid") == ["4/hour"]
    assert "it has 1/day, 2/month." in await admin.fault(1, "quota", "remove", "acme", "7/day")
    for words in (["acme", "1/day"], ["acme", "month"], ["--tier", "paid", "hour"]):
        await admin.done("quota", "remove", *words)
    assert await quotas() == ["3/day"]


@pytest.mark.parametrize("hosts", ["a.example, *.b.example:8443 ,[2001:db8::1]:80", "", "none", "Hooks.Example:65535"])
async def test_callback_hosts_are_set(admin: Admin, db: Connection, acme: str, hosts: str) -> None:
    """Gateways can read each list that the table accepts; `none` selects the list of the deployment, "" allows none."""
    await admin.done("customer", "set", "acme", "--callback-hosts", "other.example")
    await admin.done("customer", "set", "acme", "--callback-hosts", hosts)

    row = (await load(db)).customers[acme]
    entries = CallbackHosts(("deployment.example",), lambda _: row.callback_hosts, enabled=True).of(acme)
    assert entries == (("deployment.example",) if hosts == "none" else host_list(hosts))


async def test_invalid_callback_hosts_are_rejected(admin: Admin) -> None:
    """The table rejects each list that gateways could not read."""
    for hosts in ("https://a.example/", "a b", "a:0", "a:65536", "*", "a.*.b", "a,,b", "-", "a" * 2001):
        line = await admin.fault(2, "customer", "set", "acme", f"--callback-hosts={hosts}")
        assert line.startswith("callback_hosts must be hosts separated by commas")


@pytest.mark.parametrize(
    ("exit_code", "arguments", "start"),
    [
        (
            2,
            ["tier", "set", "free", "--burst", "0.5"],
            "burst must be 1 to 10,000,000, not 0.5 (bucket size of each customer",
        ),
        (2, ["tier", "set", "free", "--tokens-per-minute", "9" * 30], "tokens_per_minute must be below 9,223,372"),
        (
            2,
            ["tier", "set", "free", "--burst", "lots"],
            "--burst: must be a number, got 'lots' (bucket size of each customer",
        ),
        (2, ["tier", "set", "free", "--burst", "none"], "--burst: must be a number, got 'none' ("),
        (2, ["tier", "create", "go\udcffld", *GOLD], "'go\\udcffld' is not text in UTF-8"),
        (1, ["tier", "set", "free", "--priority", "1"], "priority 1 is that of another tier."),
        (1, ["tier", "set", "free", "--guaranteed-share", "0.9"], "The guaranteed shares of all tiers add up to 1.2"),
        (1, ["tier", "show", "go\x1b[2Jld"], "There is no tier named go\\x1b[2Jld."),
        (1, ["model", "delete", "tiny"], "There is no model named tiny."),
        (1, ["customer", "create", "acme", "--tier", "free"], "There is already a customer named acme."),
        (1, ["customer", "set", "acme", "--tier", "silver"], "There is no tier named silver; there are enterprise,"),
        (2, ["customer", "create", " beta", "--tier", "free"], "name must have 1 to 200 characters, no control"),
        (1, ["customer", "delete", "nobody"], "There is no customer named nobody."),
        (2, ["quota", "set", "acme", "0/day"], "quota must be an amount and a period"),
        (2, ["quota", "set", "acme", "5 gpu/day"], "quota must be an amount and a period, not '5 gpu/day'"),
        (2, ["quota", "remove", "acme", "often"], "quota must be an amount and a period"),
        (2, ["quota", "set", "acme", "1/day", "--tier", "free"], "Specify CUSTOMER QUOTA, "),
        (1, ["quota", "remove", "acme", "1/day"], "There is no quota 1/day of acme; it has none."),
        (1, ["quota", "list", "--tier", "silver"], "There is no tier named silver; there are "),
        (2, ["key", "create", "acme", ""], "name must have 1 to 200 characters, no control characters, not '' ("),
        (2, ["key", "create", "acme", "ci", "--burst", "5"], "--burst: requires --requests-per-second"),
        (2, ["key", "rotate", "abcdefghijkl", "--grace", "0h"], "--grace: must be a number and s, m, h, d or w"),
        (
            2,
            ["quota", "set", "acme", "5/day", "--alert-shares", "x"],
            (
                "--alert-shares: must be numbers separated by commas, such as 0.8,1, got 'x' (shares of it that raise an alert, "
                "above 0 to 1; off: no alerts; none: 0.8 and 1)"
            ),
        ),
        (
            2,
            ["quota", "set", "acme", "5 eur/day"],
            (
                "quota must be an amount and a period, not '5 eur/day' (such as 10000/day, 3600 gpu-s/day, 1000000 tokens/week or "
                "100 usd/3 months; amounts are requests, or have the unit gpu-ms, gpu-s, gpu-h, tokens, usd; the units of periods"
            ),
        ),
        (1, ["price", "set", "none", "--usd-per-gpu-s", "1"], "There is no model named none."),
        (2, ["price", "set", "none"], "Specify at least one column: --usd-per-gpu-s or --usd-per-1000-tokens."),
        (2, ["price", "set", "none", "--usd-per-gpu-s", "free"], "--usd-per-gpu-s: must be a number, got 'free' (USD"),
        (
            2,
            ["price", "set", "none", "--usd-per-gpu-s", "1", "--from", "soon"],
            "--from: must be a time, such as 2026-11-01",
        ),
        (
            1,
            ["price", "remove", "tiny", "2026-11-01"],
            "There is no price of tiny from 2026-11-01 00:00:00 UTC on; it has none.",
        ),
        (1, ["key", "show", "tl_abcdefghijkl_secret"], "There is no key abcdefghijkl."),
    ],
)
async def test_an_error_is_one_line(
    admin: Admin, db: Connection, exit_code: int, arguments: list[str], start: str
) -> None:
    """Exit code 2 for an invalid value, 1 for a change that is not possible now; no key is issued, no secret is repeated."""
    line = await admin.fault(exit_code, *arguments)

    assert line.startswith(start)
    assert "secret" not in line
    assert await db.fetchval("SELECT count(*) FROM api_keys") == 0
