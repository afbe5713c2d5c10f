"""What customers read and change of their own account, over real servers: usage, jobs and keys."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from redis.asyncio import Redis

from configs import job_config
from eventually import eventually
from integration.gateway_fixtures import Stack, running_stack
from integration.jobs_fixtures import JobBench, JobCatalog, bench, customer_id, start_jobs
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.follower import Catalog

__all__ = ["bench", "database_url", "db", "postgres_server", "start_jobs"]

Connection = Any
AWAY = "postgresql+asyncpg://postgres@127.0.0.1:1/none"
ADD_REQUEST = (
    "INSERT INTO requests (id, created_at, customer_id, api_key_id, tier, model, status, tokens_used, cost_ms) "
    "VALUES ($1, $2, $3, $4, 'free', $5, 'completed', $6, $7)"
)


async def call(stack: Stack, path: str, tier: str = "free", method: str = "GET", **options: Any) -> tuple[int, Any]:
    """Status and document of a request with the key of a tier."""
    async with stack.http.request(method, stack.url + path, headers=stack.key(tier), **options) as response:
        return response.status, await response.json()


def day(number: int) -> datetime:
    """The last second of a day: today less so many."""
    today = datetime.now(UTC).replace(hour=23, minute=59, second=59, microsecond=0)
    return today - timedelta(number)


async def fill(db: Connection) -> None:
    """Requests of two customers, with two models and keys, on five days."""
    price = day(1000), Decimal(2), Decimal("0.5")
    await db.execute("INSERT INTO prices VALUES ('tiny', $1, $2, $3)", *price)
    for n in range(60):
        owner, model = customer_id(("free", "paid")[n % 6 == 0]), ("tiny", "large")[n % 3 == 0]
        key = f"key-{n % 4}"
        await db.execute(ADD_REQUEST, f"req_{n:032x}", day(n % 5), owner, key, model, 100, 250.0)


async def test_usage_by_day_model_and_key(bench: JobBench, db: Connection) -> None:
    """Requests, tokens, GPU seconds and cost of the own customer only; both days are included; pages have no gap."""
    await fill(db)
    status, days = await call(bench.stack, "/v1/usage")
    _, models = await call(bench.stack, f"/v1/usage?by=model&from={day(1).date()}&to={day(0).date()}")
    pages, after = [], ""
    while True:
        _, page = await call(bench.stack, f"/v1/usage?by=key&limit=3&after={after}")
        pages.append([each["key_id"] for each in page["data"]])
        after = page["last_id"]
        if not page["has_more"]:
            break

    assert status == 200
    assert [each["day"] for each in days["data"]] == [str(day(n).date()) for n in (4, 3, 2, 1, 0)]
    assert sum(each["requests"] for each in days["data"]) == 50  # Those of the other customer are not counted.
    own = [n for n in range(60) if n % 6 and n % 5 in (0, 1)]
    counts = {name: sum((n % 3 == 0) == (name == "large") for n in own) for name in ("large", "tiny")}
    assert [(each["model"], each["requests"], each["tokens"], each["gpu_s"]) for each in models["data"]] == [
        (name, count, 100 * count, count / 4) for name, count in counts.items()
    ]
    assert [each["cost_usd"] for each in models["data"]] == [None, pytest.approx(counts["tiny"] * (0.5 + 0.05))]
    assert pages == [["key-0", "key-1", "key-2"], ["key-3"]]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("by=hour", "by"),
        ("from=2026-13-01", "from"),
        ("to=yesterday", "to"),
        ("from=2026-02-01&to=2026-01-01", "from"),
        ("from=2026-01-01&to=2026-04-03", "from"),
        ("limit=101", "limit"),
        ("after=%00", "after"),
        ("after=foo", "after"),
        ("group_by=model", "group_by"),
        ("by=day&by=model", "by"),
    ],
)
async def test_a_wrong_parameter_of_usage_is_named(bench: JobBench, query: str, param: str) -> None:
    """400, before PostgreSQL is asked."""
    status, document = await call(bench.stack, f"/v1/usage?{query}")

    assert (status, document["error"]["code"], document["error"]["param"]) == (400, "invalid_request", param)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/keys"])
async def test_a_wrong_parameter_of_a_list_is_named(bench: JobBench, path: str) -> None:
    """400 for a parameter that the list does not have, and for an `after` that is no id of its items."""
    for query, param in (("status=failed", "status"), ("after=foo", "after"), (f"after=req_{'0' * 32}%0A", "after")):
        status, document = await call(bench.stack, f"{path}?{query}")
        assert (status, document["error"]["code"], document["error"]["param"]) == (400, "invalid_request", param)


async def test_usage_without_postgresql(client: Redis, redis_url: str) -> None:
    """503 with a sentence, while inference is served; without a key 401."""
    async with running_stack(client, redis_url, catalog=JobCatalog(), jobs=job_config(AWAY)) as stack:
        status, document = await call(stack, "/v1/usage")
        served, _, _ = await stack.infer()
        async with stack.http.get(f"{stack.url}/v1/usage") as response:
            unknown = response.status

    assert (status, document["error"]["code"]) == (503, "catalog_unavailable")
    assert document["error"]["message"].startswith("Usage cannot be read right now")
    assert (served, unknown) == (200, 401)


async def test_jobs_are_listed(bench: JobBench, db: Connection) -> None:
    """Those of the own customer, the newest first, in pages; without results and bodies."""
    ended = await bench.accepted({"input": "text of a job"})
    await bench.ended(ended)
    bench.stack.worker.hold = True
    others = [await bench.accepted({"input": "text of a job"}, "paid")]
    open_jobs = [await bench.accepted({"input": f"text {n}"}) for n in range(3)]
    pages, after = [], ""
    while True:
        status, page = await call(bench.stack, f"/v1/jobs?limit=2&after={after}")
        pages.append(page["data"])
        after = page["last_id"]
        if not page["has_more"]:
            break
    _, theirs = await call(bench.stack, "/v1/jobs", "paid")
    bench.stack.worker.hold = False

    assert (status, [len(page) for page in pages]) == (200, [2, 2])
    items = [item for page in pages for item in page]
    assert [item["id"] for item in items] == [*reversed(open_jobs), ended]
    assert [item["status"] for item in items] == ["PENDING"] * 3 + ["SUCCESS"]
    assert (items[0]["completed_at"], items[0]["model"], items[0]["tier"]) == (None, "tiny", "free")
    assert items[0]["callback"] is None
    assert items[3]["created_at"] <= items[3]["completed_at"] < items[3]["expires_at"]
    assert [item["id"] for item in theirs["data"]] == others
    assert "text of a job" not in str(items)
    status, document = await call(bench.stack, "/v1/jobs?limit=0")
    assert (status, document["error"]["param"]) == (400, "limit")


async def test_jobs_without_postgresql(client: Redis, redis_url: str) -> None:
    """503 with a sentence."""
    async with running_stack(client, redis_url, catalog=JobCatalog(), jobs=job_config(AWAY)) as stack:
        status, document = await call(stack, "/v1/jobs")

    assert (status, document["error"]["code"]) == (503, "catalog_unavailable")
    assert document["error"]["message"].startswith("Jobs and keys cannot be read")


class KeyBench:
    """A gateway that follows PostgreSQL, and calls with keys of its customers."""

    def __init__(self, stack: Stack, db: Connection) -> None:
        self.stack = stack
        self.db = db

    async def issue(self, customer: str) -> str:
        """A new key of a customer, once the gateway knows it."""
        key = str(await self.db.fetchval("SELECT issue_api_key($1, 'first')", customer))
        await self.until(key, 200)
        return key

    async def call(self, key: str, method: str = "GET", path: str = "/v1/keys", **body: Any) -> tuple[int, Any]:
        """Status and document of a request; `body` is its JSON, if it has one."""
        headers, options = {"Authorization": f"Bearer {key}"}, {"json": body} if method == "POST" else {}
        async with self.stack.http.request(method, self.stack.url + path, headers=headers, **options) as response:
            return response.status, await response.json()

    async def created(self, key: str, **body: Any) -> dict[str, Any]:
        """A key that could be created."""
        status, document = await self.call(key, "POST", **body)
        assert status == 200, document
        return dict(document)

    async def until(self, key: str, status: int) -> None:
        """Wait until the models can be read with a key, or not any more: a change is followed within a second."""

        async def reached() -> bool:
            await asyncio.sleep(0.1)  # Too many requests with an unknown key are limited by address.
            return (await self.call(key, path="/v1/models"))[0] == status

        await eventually(reached, f"the key gets {status}", 3.0)


@pytest.fixture
async def keys(client: Redis, redis_url: str, database_url: str, db: Connection) -> AsyncIterator[KeyBench]:
    """The customers acme and other manage their keys; plain does not."""
    await db.execute("INSERT INTO models (name) VALUES ('tiny'), ('large')")
    await db.execute(
        "INSERT INTO customers (name, tier, manages_keys) VALUES "
        "('acme', 'paid', true), ('other', 'paid', true), ('plain', 'paid', false)"
    )
    catalog: Any = Catalog(database_url)
    await catalog.start()
    try:
        async with running_stack(client, redis_url, catalog=catalog, jobs=job_config(database_url)) as stack:
            yield KeyBench(stack, db)
    finally:
        await catalog.stop()


async def test_a_key_is_created_used_and_revoked(keys: KeyBench) -> None:
    """The secret is in one response only; the revoked key stops within a second; config_changes names the customer."""
    first = await keys.issue("acme")
    made = await keys.created(first, name="ci")
    await keys.until(made["key"], 200)
    _, listed = await keys.call(made["key"])
    status, revoked = await keys.call(first, "DELETE", f"/v1/keys/{made['id']}")
    await keys.until(made["key"], 401)

    assert [(each["id"], each["name"], each["state"]) for each in listed["data"]] == [
        (made["id"], "ci", "live"),
        (first[3:15], "first", "live"),
    ]
    assert made["key"].startswith(f"tl_{made['id']}_")
    secret = made["key"].split("_")[2]
    assert secret not in str(listed)
    assert (status, revoked["state"]) == (200, "revoked")
    assert await keys.call(first, "DELETE", f"/v1/keys/{made['id']}") == (200, revoked)
    changes = await keys.db.fetch(
        "SELECT changed_by, row_key, old, new FROM config_changes WHERE row_key = $1", made["id"]
    )
    assert [row["changed_by"] for row in changes] == ["customer acme"] * 2
    assert secret not in str([tuple(row) for row in changes])


async def test_keys_of_other_customers_are_unknown(keys: KeyBench) -> None:
    """They are not listed, cannot be revoked, and are no place in a list; a customer that may not manage keys gets 403."""
    mine, theirs, plain = [await keys.issue(name) for name in ("acme", "other", "plain")]
    _, listed = await keys.call(mine)
    _, behind = await keys.call(mine, path=f"/v1/keys?after={theirs[3:15]}")
    ids = (theirs[3:15], "0" * 12, "%00", "a%2Fb", mine)
    refused = [await keys.call(mine, "DELETE", f"/v1/keys/{each}") for each in ids]
    forbidden = [
        await keys.call(plain),
        await keys.call(plain, "POST", name="ci"),
        await keys.call(plain, "DELETE", f"/v1/keys/{plain[3:15]}"),
    ]

    assert [each["id"] for each in listed["data"]] == [mine[3:15]]
    assert behind["data"] == []
    assert {(status, document["error"]["code"]) for status, document in refused} == {(404, "not_found")}
    assert "its id is its middle part" in refused[-1][1]["error"]["message"]
    assert {(status, document["error"]["code"]) for status, document in forbidden} == {(403, "permission_denied")}
    assert (await keys.call(theirs, path="/v1/models"))[0] == 200
    assert (await keys.call(plain, path="/v1/models"))[0] == 200
    assert await keys.db.fetchval("SELECT count(*) FROM api_keys") == 3


async def test_a_key_has_at_most_the_rights_of_the_one_that_creates_it(keys: KeyBench) -> None:
    """Models, rate, burst and end; what is not given is inherited."""
    first = await keys.issue("acme")
    end = int(time.time()) + 3600
    narrow = await keys.created(first, name="narrow", models=["tiny"], requests_per_second=50, burst=80, expires_at=end)
    await keys.until(narrow["key"], 200)
    for body, status, param in (
        ({"models": ["large"]}, 404, "models"),
        ({"models": ["tiny", "nobody"]}, 404, "models"),
        ({"requests_per_second": 51}, 400, "requests_per_second"),
        ({"quotas": "10/day"}, 400, "quotas"),
        ({"burst": 81}, 400, "burst"),
        ({"expires_at": end + 1}, 400, "expires_at"),
        ({"expires_at": 1000}, 400, "expires_at"),
        ({"name": ""}, 400, "name"),
        ({"weight": 2}, 400, "weight"),
    ):
        returned, document = await keys.call(narrow["key"], "POST", **{"name": "wider"} | body)
        assert (returned, document["error"]["param"]) == (status, param), body
    above = await keys.call(first, "POST", name="above", requests_per_second=1e6)
    same = await keys.created(narrow["key"], name="same")
    less = await keys.created(narrow["key"], name="less", requests_per_second=2, expires_at=end - 60)

    assert (above[0], "that of your account" in above[1]["error"]["message"]) == (400, True)
    terms = ("models", "requests_per_second", "burst", "expires_at")
    assert [same[name] for name in terms] == [["tiny"], 50.0, 80.0, end]
    assert [less[name] for name in terms] == [["tiny"], 2.0, 2.0, end - 60]
    await keys.db.execute("UPDATE customers SET models = ARRAY['tiny'] WHERE name = 'acme'")
    plain = await keys.created(first, name="plain")
    assert plain["models"] is None  # That of the customer, also if it changes.
    await eventually(lambda: _is_limited(keys, first), "the gateway follows the models of the customer")
    assert (await keys.call(first, "POST", name="large", models=["large"]))[0] == 404


async def test_a_key_has_quotas_of_its_own(keys: KeyBench) -> None:
    """Beside those of the customer, in /v1/me too. A key that it creates shares them, and cannot have others."""
    first = await keys.issue("acme")
    for quotas, fault in (
        (["much"], "is not an amount"),
        (["1/day", "2 requests/day"], "for the same period"),
        ([], '`["10/day", "100 usd/month"]`'),
        ("10/day", '`["10/day", "100 usd/month"]`'),
    ):
        status, document = await keys.call(first, "POST", name="ci", quotas=quotas)
        assert (status, fault in document["error"]["message"], document["error"]["param"]) == (400, True, "quotas")
    made = await keys.created(first, name="ci", quotas=["2 requests per day", "7 tokens/week"])
    await keys.until(made["key"], 200)
    _, me = await keys.call(made["key"], path="/v1/me")
    shared = await keys.created(made["key"], name="also")
    refused = await keys.call(made["key"], "POST", name="wider", quotas=["9/day"])

    assert made["quotas"] == shared["quotas"] == ["2 per day", "7 tokens/week"]
    assert [(each["quota"], each["key_id"], each["amount"]) for each in me["remaining"]["quotas"]] == [
        ("day", made["id"], 2),
        ("week", made["id"], 7),
    ]
    assert (refused[0], refused[1]["error"]["param"]) == (400, "quotas")
    row = await keys.db.fetchrow("SELECT quota_key FROM api_keys WHERE id = $1", shared["id"])
    assert row["quota_key"] == made["id"]


async def _is_limited(keys: KeyBench, key: str) -> bool:
    _, listed = await keys.call(key, path="/v1/models")
    return [each["id"] for each in listed["data"]] == ["tiny"]


async def test_the_number_of_keys_is_bounded(keys: KeyBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are valid, and of those created in a day, also under concurrent calls."""
    monkeypatch.setattr("ledger.keys.MOST_LIVE", 5)
    monkeypatch.setattr("ledger.keys.MOST_A_DAY", 6)
    first = await keys.issue("acme")
    answers = await asyncio.gather(*(keys.call(first, "POST", name=f"k{n}") for n in range(8)))
    made = [document["id"] for status, document in answers if status == 200]
    refused = {(status, document["error"]["code"]) for status, document in answers if status != 200}
    await keys.call(first, "DELETE", f"/v1/keys/{made[0]}")
    await keys.call(first, "DELETE", f"/v1/keys/{made[1]}")
    again = [await keys.call(first, "POST", name="again") for _ in range(2)]

    assert (len(made), refused) == (4, {(429, "quota_exceeded")})
    assert [status for status, _ in again] == [200, 429]
    _, page = await keys.call(first, path="/v1/keys?limit=4")
    _, rest = await keys.call(first, path=f"/v1/keys?limit=4&after={page['last_id']}")
    assert (page["has_more"], rest["has_more"], len(page["data"]), len(rest["data"])) == (True, False, 4, 2)


async def test_keys_without_postgresql(client: Redis, redis_url: str) -> None:
    """503 with a sentence; nothing is created."""
    async with running_stack(client, redis_url, catalog=JobCatalog(), jobs=job_config(AWAY)) as stack:
        answers = [
            await call(stack, "/v1/keys"),
            await call(stack, "/v1/keys", method="POST", json={"name": "ci"}),
            await call(stack, "/v1/keys/0123456789ab", method="DELETE"),
        ]

    assert {(status, document["error"]["code"]) for status, document in answers} == {(503, "catalog_unavailable")}
