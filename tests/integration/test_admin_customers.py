"""`tierlane customer` and `tierlane quota`: what each verb does in SQL, and what is said where it is refused."""

from typing import Any

import pytest

from gateway.host_lists import CallbackHosts, host_list
from gateway.jobs.webhook_security import customer_key, secret_bytes, secret_text
from integration.admin_bench import Admin, customer
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.loader import load

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


@pytest.fixture
def admin(database_url: str) -> Admin:
    return Admin(database_url)


async def test_a_customer_is_created_and_changed(admin: Admin, db: Connection) -> None:
    """Own limits where given, the tier's again with `none`; by name or by id."""
    said = await admin.done("customer", "create", "Acme & Co", "--tier", "free", "--burst", "50")
    made = await db.fetchrow("SELECT id::text, tier, status, requests_per_second, burst FROM customers")
    await admin.done("customer", "set", made["id"].upper(), "--tier", "paid", "--tokens-per-minute", "6,000")
    await admin.done("customer", "set", "Acme & Co", "--burst", "none")

    assert tuple(made)[1:] == ("free", "active", None, 50.0)
    assert "has no key yet" in said
    after = await db.fetchrow("SELECT tier, burst, tokens_per_minute FROM customers")
    assert tuple(after) == ("paid", None, 6000)


async def test_a_customer_is_suspended_and_activated(admin: Admin, db: Connection) -> None:
    """A change like any other; the second time there is nothing to change."""
    acme = await customer(db)

    assert "status  active -> suspended" in await admin.done("customer", "suspend", "acme")
    assert (await load(db)).customers[acme].suspended
    assert await admin.done("customer", "suspend", "acme") == "customer acme: nothing to change\n"
    assert "status  suspended -> active" in await admin.done("customer", "activate", "acme")
    assert not (await load(db)).customers[acme].suspended


async def test_customers_are_listed_by_name(admin: Admin, db: Connection) -> None:
    """Narrowed by tier and status, cut at a limit that says how many there are."""
    for name, tier in (("cherry", "free"), ("acme", "paid"), ("beta", "free")):
        await customer(db, name, tier)
    await admin.done("customer", "suspend", "beta")
    await admin.done("key", "create", "acme", "ci")

    async def names(*options: str) -> list[str]:
        return [row["name"] for row in await admin.json("customer", "list", *options)]

    cut = await admin.run("customer", "list", "--limit", "2")
    assert [line.split()[0] for line in cut.stdout.splitlines()[1:]] == ["acme", "beta"]
    assert cut.stderr == "2 of 3 customers; --limit N shows more.\n"
    assert await names() == ["acme", "beta", "cherry"]
    assert await names("--tier", "free") == ["beta", "cherry"]
    assert await names("--tier", "free", "--status", "suspended") == ["beta"]
    assert await admin.done("customer", "list", "--tier", "enterprise") == "No customers.\n"
    assert [row["live_keys"] for row in await admin.json("customer", "list")] == [1, 0, 0]


async def test_a_customer_is_shown_whole(admin: Admin, db: Connection) -> None:
    """Base limits with whose they are, quotas of its own and of its tier, keys."""
    await customer(db)
    await admin.done("customer", "set", "acme", "--burst", "50")
    await admin.done("quota", "set", "acme", "10000/day")
    await admin.done("quota", "set", "--tier", "paid", "100000/month")
    await admin.done("key", "create", "acme", "nightly")

    shown = [line.split() for line in (await admin.done("customer", "show", "acme")).splitlines()]
    as_json = await admin.json("customer", "show", "acme")

    assert ["burst", "50", "own"] in shown
    assert ["requests_per_second", "1,000", "tier", "paid"] in shown
    assert ["10000/day", "own"] in shown
    assert ["100000/month", "tier", "paid"] in shown
    assert any("nightly" in line and "live" in line for line in shown)
    assert {(limit["limit"], limit["source"]) for limit in as_json["limits"]} >= {
        ("burst", "own"),
        ("max_queue_ms", "tier paid"),
    }
    assert [key["name"] for key in as_json["keys"]] == ["nightly"]
    assert "secret" not in str(as_json)


async def test_deleting_a_customer_asks_before(admin: Admin, db: Connection) -> None:
    """It says what goes along; no answer and no are no."""
    await customer(db)
    await admin.done("key", "create", "acme", "ci")
    for said in ("", "n\n"):
        refused = await admin.run("customer", "delete", "acme", input=said)
        assert refused.exit_code == 1
        assert "Delete customer acme with 1 key and 0 quotas?" in refused.stdout
    assert await db.fetchval("SELECT count(*) FROM customers") == 1

    done = await admin.run("customer", "delete", "acme", input="y\n")

    assert done.exit_code == 0
    assert "customer acme: deleted\nAlso deleted: 1 key and 0 quotas." in done.stdout
    assert (
        await db.fetchval("SELECT count(*) FROM customers") == await db.fetchval("SELECT count(*) FROM api_keys") == 0
    )
    await customer(db)
    assert "customer acme: deleted" in await admin.done("customer", "delete", "acme", "--yes")


async def test_a_quota_takes_the_place_of_one_of_the_same_period(admin: Admin, db: Connection) -> None:
    """However it is written; other periods stay, and so does the row, so that nothing comes free meanwhile."""
    acme = await customer(db)

    async def held() -> tuple[tuple[str, int], ...]:
        return (await load(db)).customers[acme].quotas

    await admin.done("quota", "set", "acme", "10000/day")
    first = await db.fetchval("SELECT id FROM quotas")
    await admin.done("quota", "set", "acme", "500/hour")
    said = await admin.done("quota", "set", "acme", "20000 per 1 day")

    assert "quota  10000/day -> 20000 per 1 day" in said
    assert await held() == (("1hour", 500), ("1day", 20000))
    assert await db.fetchval("SELECT id FROM quotas WHERE quota = '20000 per 1 day'") == first
    assert await admin.done("quota", "set", "acme", "500/hour") == "quota 500/hour of acme: nothing to change\n"
    await db.execute("INSERT INTO quotas (customer_id, quota) VALUES ($1, '7/day')", acme)
    await admin.done("quota", "set", "acme", "8/day")
    assert await held() == (("1hour", 500), ("1day", 8))
    assert await db.fetchval("SELECT count(*) FROM quotas") == 2


async def test_quotas_are_listed_and_removed(admin: Admin, db: Connection) -> None:
    """By text or by period; what holds for a customer is its own and its tier's."""
    await customer(db)
    await customer(db, "beta", "free")
    for words in (["acme", "1/day"], ["acme", "2/month"], ["beta", "3/day"], ["--tier", "paid", "4/hour"]):
        await admin.done("quota", "set", *words)

    async def texts(*options: str) -> list[str]:
        return [row["quota"] for row in await admin.json("quota", "list", *options)]

    assert await texts() == ["4/hour", "1/day", "2/month", "3/day"]
    assert await texts("--customer", "acme") == ["4/hour", "1/day", "2/month"]
    assert await texts("--tier", "paid") == ["4/hour"]
    assert await admin.done("quota", "list", "--tier", "free") == "No quotas.\n"
    assert await admin.fault(1, "quota", "remove", "acme", "7/day") == (
        "There is no quota 7/day of acme; it has 1/day, 2/month."
    )
    await admin.done("quota", "remove", "acme", "1/day")
    await admin.done("quota", "remove", "acme", "month")
    await admin.done("quota", "remove", "--tier", "paid", "hour")
    assert await texts() == ["3/day"]


@pytest.mark.parametrize(
    ("exit_code", "arguments", "said"),
    [
        (1, ["customer", "create", "acme", "--tier", "free"], "There is already a customer named acme."),
        (
            1,
            ["customer", "create", "beta", "--tier", "silver"],
            "There is no tier named silver; there are enterprise, paid, free.",
        ),
        (1, ["customer", "set", "acme", "--tier", "silver"], "There is no tier named silver; there are enterprise,"),
        (2, ["customer", "create", "beta"], "Required: --tier."),
        (2, ["customer", "create", " beta", "--tier", "free"], "name must have 1 to 200 characters, no control"),
        (2, ["customer", "set", "acme", "--burst", "0"], "burst must be 1 to 10,000,000, not 0 (own bucket size,"),
        (2, ["customer", "set", "acme"], "Specify at least one column: --tier, "),
        (1, ["customer", "set", "nobody", "--burst", "5"], "There is no customer named nobody."),
        (1, ["customer", "show", "nobody"], "There is no customer named nobody."),
        (1, ["customer", "suspend", "nobody"], "There is no customer named nobody."),
        (1, ["customer", "delete", "nobody", "--yes"], "There is no customer named nobody."),
        (1, ["customer", "delete", "nobody"], "There is no customer named nobody."),
        (2, ["quota", "set", "acme", "plenty"], "quota must be a number of requests and a period, not 'plenty' ("),
        (2, ["quota", "set", "acme", "0/day"], "quota must be a number of requests and a period, not '0/day' ("),
        (2, ["quota", "set", "acme", "1/day; 2/hour"], "quota must be a number of requests and a period, not '1/day; "),
        (2, ["quota", "remove", "acme", "often"], "quota must be a number of requests and a period, not 'often' ("),
        (2, ["quota", "set", "1/day"], "Specify CUSTOMER QUOTA, or --tier TIER QUOTA"),
        (2, ["quota", "set", "acme", "1/day", "--tier", "free"], "Specify CUSTOMER QUOTA, "),
        (1, ["quota", "set", "nobody", "1/day"], "There is no customer named nobody."),
        (1, ["quota", "set", "--tier", "silver", "1/day"], "There is no tier named silver."),
        (1, ["quota", "remove", "acme", "1/day"], "There is no quota 1/day of acme; it has none."),
        (1, ["quota", "list", "--customer", "nobody"], "There is no customer named nobody."),
        (1, ["quota", "list", "--tier", "silver"], "There is no tier named silver; there are "),
    ],
)
async def test_a_fault_is_one_sentence(
    admin: Admin, db: Connection, exit_code: int, arguments: list[str], said: str
) -> None:
    """It names what is not there, or the field and its fault."""
    await customer(db)

    assert (await admin.fault(exit_code, *arguments)).startswith(said)


@pytest.mark.parametrize(
    "hosts",
    ["hooks.example.com", "a.example, *.b.example:8443 ,[2001:db8::1]:80", "", "none", "Hooks.Example.COM:65535"],
)
async def test_where_a_customers_callbacks_may_go(admin: Admin, db: Connection, hosts: str) -> None:
    """Gateways read what the table takes; `none` is the deployment's list, and nothing is no callbacks."""
    acme = await customer(db)
    await admin.done("customer", "set", "acme", "--callback-hosts", "other.example")
    await admin.done("customer", "set", "acme", "--callback-hosts", hosts)

    row = (await load(db)).customers[acme]
    assert row.callback_hosts == (None if hosts == "none" else hosts)
    entries = CallbackHosts(("deployment.example",), lambda _: row.callback_hosts).of(acme)
    assert entries == (("deployment.example",) if hosts == "none" else host_list(hosts))


@pytest.mark.parametrize(
    "hosts", ["https://a.example/", "a b", "a:0", "a:65536", "*", "a.*.b", "a,,b", "-", "a" * 2001]
)
async def test_what_is_no_list_of_hosts_is_refused(admin: Admin, db: Connection, hosts: str) -> None:
    """In words that say what one is."""
    await customer(db)
    said = await admin.fault(2, "customer", "set", "acme", f"--callback-hosts={hosts}")

    assert "callback_hosts must be hosts separated by commas, each name, *.name, name:port" in said


async def test_the_secret_that_signs_a_customers_callbacks_is_shown(
    admin: Admin, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever has the deployment's; without that it says what to set."""
    acme = await customer(db)
    without = await admin.fault(1, "customer", "show", "acme", "--webhook-secret")
    deployment = secret_text(b"a secret of thirty-two bytes 123")
    monkeypatch.setenv("TIERLANE_CALLBACK_SECRET", deployment)
    secret = secret_text(customer_key(secret_bytes(deployment), acme))

    assert "TIERLANE_CALLBACK_SECRET is not set. Set it to the value of the gateways." in without
    assert await admin.done("customer", "show", "acme", "--webhook-secret") == f"{secret}\n"
    assert await admin.json("customer", "show", "acme", "--webhook-secret") == {
        "name": "acme",
        "webhook_secret": secret,
    }
