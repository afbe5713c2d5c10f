"""The admin API over the audit: requests, customers with their use, workers, usage and config changes."""

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from integration.admin_api_fixtures import AdminApi, add_requests, api
from integration.admin_fixtures import Admin, acme, customer
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["acme", "api", "database_url", "db", "postgres_server"]

Connection = Any


async def test_requests_are_searched_in_the_audit(api: AdminApi, db: Connection, acme: str) -> None:
    """By customer, time, code, model and status, in parts; one request by its id."""
    ids = await add_requests(db, acme, 5)
    await customer(db, "other")
    first = await api.done("GET", "/requests?customer=acme&model=tiny&limit=3")
    second = await api.done("GET", f"/requests?customer=acme&model=tiny&limit=3&after={first['next']}")
    failed = await api.done("GET", "/requests?error_code=gpu_timeout&status=failed")
    one = await api.done("GET", f"/requests/{ids[1]}")
    empty = [
        (await api.done("GET", f"/requests?{query}"))["data"]
        for query in ("customer=other", "tier=free", "to=2026-01-01", "from=2126-01-01&to=2126-01-02")
    ]

    assert [row["id"] for row in first["data"] + second["data"]] == ids
    assert second["next"] is None
    assert [row["id"] for row in failed["data"]] == ids[1::2]
    assert (one["error_code"], one["customer_id"]) == ("gpu_timeout", acme)
    assert empty == [[]] * 4
    assert (await api("GET", "/requests?after=x")).body["error"]["param"] == "after"
    assert (await api("GET", "/requests/x")).status == 404


async def test_customers_are_found_by_a_part_of_their_name_with_what_they_have_used(
    api: AdminApi, db: Connection, acme: str
) -> None:
    """Requests, GPU time and money of the current period, of own quotas and of the tier's, in the order of the customers."""
    for name in ("beta", "Acme-2", "a%me"):
        await customer(db, name)
    await add_requests(db, acme, 4)
    await db.execute("INSERT INTO prices (model, valid_from, usd_per_gpu_s) VALUES ('tiny', '2026-01-01', 2)")
    for body in (
        {"customer": "acme", "quota": "5/year"},
        {"customer": "acme", "quota": "100 usd/year"},
        {"tier": "paid", "quota": "10 gpu-s/year"},
    ):
        await api.done("POST", "/quotas", body)
    found = await api.done("GET", "/customers?search=ACME")
    of_one = (await api.done("GET", "/quota-usage?customer=acme"))["data"]
    first = await api.done("GET", "/quota-usage?search=me&limit=2")
    second = await api.done("GET", f"/quota-usage?search=me&limit=2&after={quote(first['next'])}")
    listed = first["data"] + second["data"]

    assert [row["name"] for row in found["data"]] == ["Acme-2", "acme"]
    assert [row["name"] for row in (await api.done("GET", "/customers?search=%25"))["data"]] == ["a%me"]
    (row,) = of_one
    assert (row["customer"], row["customer_id"]) == ("acme", acme)
    assert [(each["quota"], each["tier"], each["unit"], each["used"], each["amount"]) for each in row["quotas"]] == [
        ("5/year", None, "requests", 4, 5),
        ("100 usd/year", None, "usd", 4, 100),
        ("10 gpu-s/year", "paid", "gpu-s", 2, 10),
    ]
    assert row["quotas"][0]["since"] < f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}" < row["quotas"][0]["until"]
    assert [each["customer"] for each in listed] == [
        each["name"] for each in (await api.done("GET", "/customers?search=me"))["data"]
    ]
    assert row in listed
    assert [len(each["quotas"]) for each in listed] == [3 if each["customer"] == "acme" else 1 for each in listed]


async def test_workers_are_those_of_the_audit_and_the_cordons(api: AdminApi, db: Connection, acme: str) -> None:
    """With their requests of the last ten minutes."""
    ids = await add_requests(db, acme, 3)
    await db.execute("UPDATE requests SET worker_id = CASE WHEN id = $1 THEN 'gpu-2' ELSE 'gpu-1' END", ids[0])
    await api.done("PUT", "/cordons/gpu-2", {"reason": "its fan"})
    await api.done("PUT", "/cordons/gpu-9", {})
    rows = (await api.done("GET", "/workers"))["data"]

    assert [(row["worker"], row["requests"], row["last_request_at"] is None) for row in rows] == [
        ("gpu-1", 2, False),
        ("gpu-2", 1, False),
        ("gpu-9", 0, True),
    ]
    assert [row["cordon"] and row["cordon"]["reason"] for row in rows] == [None, "its fan", ""]


async def test_usage_is_that_of_the_export(api: AdminApi, db: Connection, acme: str, database_url: str) -> None:
    """With cost, of all customers or one, in parts."""
    await add_requests(db, acme, 4)
    await db.execute("UPDATE requests SET model = 'big' WHERE status = 'failed'")
    await db.execute("INSERT INTO prices (model, valid_from, usd_per_gpu_s) VALUES ('tiny', '2026-01-01', 2)")
    days = "2026-01-01", f"{datetime.now(UTC) + timedelta(days=1):%Y-%m-%d}"
    query = f"from={days[0]}&to={days[1]}&by=total"
    whole = await api.done("GET", f"/usage?{query}&customer=acme")
    first = await api.done("GET", f"/usage?{query}&limit=1")
    second = await api.done("GET", f"/usage?{query}&limit=1&after={first['next']}")
    exported = await Admin(database_url).json("usage", "export", "--from", days[0], "--to", days[1], "--by", "total")
    await customer(db, "other")

    assert [(row["model"], row["requests"], row["gpu_s"], row["cost_usd"]) for row in whole["data"]] == [
        ("big", 2, 1, None),
        ("tiny", 2, 1, 2),
    ]
    assert first["data"] + second["data"] == whole["data"]
    assert [{"day": None} | row for row in exported] == whole["data"]
    assert (await api.done("GET", f"/usage?{query}&customer=other"))["data"] == []
    assert (await api("GET", "/usage?from=2026-01-02&to=2026-01-01")).body["error"]["param"] == "to"
    assert (await api("GET", "/usage?to=2026-01-01")).body["error"]["param"] == "from"


async def test_config_changes_are_paged_by_number(api: AdminApi, acme: str) -> None:
    """The newest first, of a table or an actor."""
    for burst in range(1, 5):
        await api.done("PATCH", "/customers/acme", {"burst": burst})
    path = "/config-changes?by=operator:admin&customer=acme&since=1h&limit=3"
    first = await api.done("GET", path)
    second = await api.done("GET", f"{path}&after={first['next']}")

    assert [row["new"]["burst"] for row in first["data"] + second["data"]] == [4, 3, 2, 1]
    assert (await api("GET", "/config-changes?table=x")).body["error"]["param"] == "table"
