"""The admin verbs with --url: the same output and words through the admin API as on PostgreSQL."""

import re
from typing import Any

import pytest

from integration.admin_api_fixtures import AdminApi, add_requests, api
from integration.admin_fixtures import Admin, customer
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["api", "database_url", "db", "postgres_server"]

Connection = Any
UNEQUAL = re.compile(
    r"[0-9a-f]{8}-[0-9a-f-]{27}|tlo?_\w+|\b[0-9A-Za-z]{12}\b|\d\d:\d\d:\d\d(\.\d+)?|\"id\": \d+|\bid +\d+$",
    re.MULTILINE,
)
"""What differs between two runs of a verb: secrets, ids, times."""

CHANGES = (
    "tier set free --burst 120",
    "tier create t --priority 4 --guaranteed-share 0 --requests-per-second 5 --burst 9 --max-concurrency 2 --max-queue-depth 9",
    "tier delete t",
    "model create org/big --max-batch-size 8",
    "model set org/big --enabled off",
    "customer create acme --tier paid --burst 20 --requests-per-second 5.5",
    "customer set acme --burst none",
    "customer set acme --burst none",
    "customer set acme --tier free",
    "customer set acme --tier paid",
    "customer suspend acme",
    "customer activate acme",
    "key create acme ci --expires-in 90d --requests-per-second 3 --burst 9 --quotas 7/day",
    "quota set acme 10000/day",
    "quota set --tier free 100/day",
    "quota set acme 20000/day",
    "quota set acme 30000/day --alert-shares 0.5,1",
    "quota remove acme day",
    "customer rotate-secret acme --grace 2h",
    "price set org/big --usd-per-gpu-s 0.002 --from 2027-01-01",
    "price remove org/big 2027-01-01",
    "operator create ann --role operator --expires-in 1w",
    "operator set ann --role viewer",
    "operator rotate ann",
    "operator revoke ann",
    "gpu cordon worker-1 --reason fan",
    "gpu uncordon worker-1",
    "gpu uncordon worker-1",
)
READS = (
    "tier list",
    "tier show paid",
    "model list",
    "model show org/big",
    "customer list --tier paid",
    "customer show acme",
    "key list acme",
    "quota list",
    "quota list acme",
    "quota list --tier free",
    "quota alerts",
    "quota alerts acme",
    "price list",
    "operator list",
    "config-changes --table tiers --since 1h --limit 1000",
)
FAULTS = (
    "customer show nobody",
    "customer create acme --tier paid",
    "customer set acme --tier gold",
    "customer set acme --weight 0",
    "key revoke 0123456789ab",
    "quota remove acme month",
    "tier set free --guaranteed-share 0.99",
    "operator create 'two words'",
)


def words(line: str) -> list[str]:
    return [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]


@pytest.fixture
def both(api: AdminApi, database_url: str) -> tuple[Admin, Admin]:
    """The command line on PostgreSQL, and one without any server but the admin API."""
    remote = Admin("", TIERLANE_ADMIN_TOKEN=api.tokens["admin"])
    del remote._env["TIERLANE_DATABASE_URL"]
    return Admin(database_url), remote


def url_of(api: AdminApi) -> tuple[str, str]:
    return "--url", api.url


async def test_changes_and_lists_are_the_same(api: AdminApi, both: tuple[Admin, Admin], db: Connection) -> None:
    """Text and JSON, of changes on an equal database in a dry run, and of lists afterwards."""
    local, remote = both
    differences = list[tuple[str, str, str]]()
    await db.execute("INSERT INTO prices (model, valid_from, usd_per_gpu_s) VALUES ('x', '2026-01-01', 0.002)")
    for line in CHANGES:
        dry = [
            UNEQUAL.sub("_", await each.done(*words(line), "--dry-run", *url, "-o", form))
            for form in ("table", "json")
            for each, url in ((local, ()), (remote, url_of(api)))
        ]
        done = await remote.done(*words(line), *url_of(api))
        lines = [each for each in UNEQUAL.sub("_", done).splitlines() if "admin_change" not in each]

        assert lines[0] == dry[1].splitlines()[0].replace("would be ", "")
        differences += [(line, *pair) for pair in ((dry[0], dry[1]), (dry[2], dry[3])) if pair[0] != pair[1]]
    for line in READS:
        for form in ("table", "json"):
            local_text, remote_text = (
                await local.done(*words(line), "-o", form),
                await remote.done(*words(line), *url_of(api), "-o", form),
            )
            differences += [(line, local_text, remote_text)] if local_text != remote_text else []

    assert differences == []
    assert [row["key"] is not None for row in await local.json("quota", "list", "acme") if row["quota"] == "7/day"] == [
        True
    ]
    assert await remote.json("config-changes", "--by", "admin", *url_of(api))
    changed_by = await db.fetch(
        "SELECT DISTINCT changed_by FROM config_changes WHERE changed_by NOT IN ('test', 'postgres')"
    )
    assert "operator:admin" in [row["changed_by"] for row in changed_by]


async def test_requests_of_the_audit_are_the_same(api: AdminApi, both: tuple[Admin, Admin], db: Connection) -> None:
    """The newest first, by customer, status, code, model and age; of all customers with their names."""
    local, remote = both
    ids = await add_requests(db, await customer(db), 4)
    await customer(db, "other")
    for line, found in (
        ("requests", ids),
        ("requests acme --status failed --since 2h", ids[1::2]),
        ("requests --customer acme --model tiny --limit 4", ids),
        ("requests --code gpu_timeout", ids[1::2]),
        ("requests --model none", []),
        ("requests other", []),
    ):
        rows = [await local.json(*words(line)), await remote.json(*words(line), *url_of(api))]
        tables = [await local.done(*words(line)), await remote.done(*words(line), *url_of(api))]

        assert [row["id"] for row in rows[0]] == found, line
        assert (rows[0], tables[0]) == (rows[1], tables[1]), line
        assert {row["customer"] for row in rows[0]} <= {"acme"}
    some = await local.run("requests", "--limit", "3")
    assert some.stderr == "3 of more requests; --limit N shows more.\n"
    assert [line.split()[4:8] for line in some.stdout.splitlines()[1:3]] == [
        ["acme", "tiny", "completed", "-"],
        ["acme", "tiny", "failed", "gpu_timeout"],
    ]
    assert "There is no customer" in await local.fault(1, "requests", "nobody")
    assert "--code: must be an error code" in await local.fault(2, "requests", "--code", "typo")


async def test_faults_have_the_same_words_and_exit_codes(
    api: AdminApi, both: tuple[Admin, Admin], db: Connection
) -> None:
    """Of values, names in use and missing rows."""
    local, remote = both
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    for line in FAULTS:
        results = [await local.run(*words(line)), await remote.run(*words(line), *url_of(api))]

        assert len({(result.exit_code, result.stderr) for result in results}) == 1, [
            result.stderr for result in results
        ]
        assert results[0].exit_code in (1, 2)


async def test_lists_say_that_there_is_more(api: AdminApi, both: tuple[Admin, Admin], db: Connection) -> None:
    """More than a response has, too."""
    await db.execute("INSERT INTO customers (name, tier) SELECT 'c' || n, 'paid' FROM generate_series(1, 1010) n")
    some = await both[1].run("customer", "list", "--limit", "3", *url_of(api))
    many = await both[1].json("customer", "list", "--limit", "2000", *url_of(api))

    assert some.stderr == "3 of more customers; --limit N shows more.\n"
    assert len(many) == 1010


async def test_what_needs_servers_says_so_by_name(api: AdminApi, both: tuple[Admin, Admin]) -> None:
    """And uses none, though they are configured. A token is needed, and one that is valid."""
    local, remote = both
    for line in (
        "gpu list",
        "cell list",
        "queue list",
        "cell drain default",
        "usage export --from 2026-11-01 --to 2026-11-02",
    ):
        name = " ".join(line.split()[:2])
        for each in (local, remote):
            fault = await each.fault(1, *words(line), *url_of(api))
            assert fault == f"`tierlane {name}` needs PostgreSQL or Redis: it cannot be used with --url.", line
    assert "TIERLANE_ADMIN_TOKEN: is not set" in await local.fault(2, "tier", "list", *url_of(api))
    wrong = Admin("", TIERLANE_ADMIN_TOKEN="tlo_wrong-token-of-nobody")
    assert "operator's token is not valid" in await wrong.fault(1, "tier", "list", *url_of(api))
    assert "does not respond" in await remote.fault(1, "tier", "list", "--url", "http://127.0.0.1:1")
    assert "must begin with http" in await remote.fault(2, "tier", "list", "--url", "127.0.0.1:1")
