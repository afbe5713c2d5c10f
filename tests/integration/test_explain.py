"""`tierlane explain` on real servers: customers, accepted and rejected requests, and servers that are unavailable."""

import asyncio
import json
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner, Result

from eventually import eventually
from gateway.limits.rejection_log import RejectionLog
from integration.admin_api_fixtures import add_requests
from integration.audit_fixtures import auditor_for, running
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.snapshot import Identity
from pool import Pool, done
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Submission, TierLimit
from scheduler.protocol.pool_view import GatewayStats, TierStats
from scheduler.request_id import new_request_id
from scheduler.states import Admission
from tierlane.explain.command import app

__all__ = ["database_url", "db", "postgres_server"]

NO_POSTGRES = "postgresql+asyncpg://user:hunter2@/lane?host=/nonexistent"
NO_REDIS = "unix:///nonexistent/redis.sock"
TIERS = {
    "enterprise": TierStats(200.0, 0.0, 80.0, 1.0, 200.0),
    "paid": TierStats(88.0, 0.0, 80.0, 1.0, 88.0),
    "free": TierStats(80.0, 9.0, 80.0, 0.4, 32.0),
}
STATS = GatewayStats("g1", 368.0, TIERS, 320.0)


async def explain(*arguments: str, redis_url: str = "", database_url: str = "") -> Result:
    """Run `tierlane explain` with these servers."""
    env = {
        "TIERLANE_REDIS_URL": redis_url,
        "TIERLANE_DATABASE_URL": database_url,
        "TIERLANE_DATA_DIR": "/nonexistent",
        "COLUMNS": "300",
    }
    result: Result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=env)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def servers(redis_url: str, database_url: str) -> dict[str, str]:
    return {"redis_url": redis_url, "database_url": database_url}


@pytest.fixture
async def acme(db: Any) -> str:
    """The id of a customer of tier free with a burst of its own, a quota and a key with a limit."""
    await db.execute("INSERT INTO models (name, rps_per_gpu, target_utilization) VALUES ('tiny', 50, 0.8)")
    await db.execute("UPDATE tiers SET requests_per_second = 100, burst = 40, tokens_per_minute = 60000")
    await db.execute("INSERT INTO customers (name, tier, burst) VALUES ('acme', 'free', 10)")
    await db.execute("INSERT INTO quotas (customer_id, quota) SELECT id, '1000/day' FROM customers")
    await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    await db.execute(
        "UPDATE api_keys SET requests_per_second = 20, burst = 5, models = ARRAY['tiny'], quotas = '{9/hour}'"
    )
    await db.execute("UPDATE customers SET models = ARRAY['tiny', 'large']")
    return str(await db.fetchval("SELECT id::text FROM customers"))


def submission(pool: Pool, customer_id: str, **changes: Any) -> Submission:
    """A request as a gateway submits it with tier free at 40 %."""
    limits = {"rate": 40.0, "burst": 4.0, "tokens_per_minute": 24_000.0, "quotas": (("1day", 1000),)}
    return pool.submission(customer_id=customer_id, tokens=100, **limits | changes)


async def reject(pool: Pool, customer_id: str) -> str:
    """Record a rejection as a gateway does; return its request's id."""
    identity = Identity("k1", customer_id, "acme", "free", 2000, limits=(100.0, 10.0, 50, 60_000))
    log, rejected = RejectionLog(), submission(pool, customer_id, rate=1e-9, burst=1e-9)
    (verdict,) = await pool.admit([rejected])
    log.note(rejected, identity, RequestError(ErrorCode.REDUCED_CAPACITY), verdict, 0.4)
    await pool.presence.gateway_beat(STATS, log.drain())
    return rejected.id


async def test_a_customer(pool: Pool, servers: dict[str, str], db: Any, acme: str) -> None:
    """By name or id: base limits and the last failed requests from PostgreSQL; the factor, what is left and rejections from Redis."""
    request_id = await reject(pool, acme)
    await reject(pool, "another customer")
    for number in range(4):
        await pool.worker_beats(f"w{number}")
    await pool.worker_beats("w4", "cordoned")
    async with db.transaction():
        await db.execute("SELECT set_config('tierlane.actor', 'ann', true)")
        await db.execute("INSERT INTO cordons (worker, reason) VALUES ('w4', 'ticket 4711')")
    await pool.presence.gateway_beat(STATS)
    failed = await add_requests(db, acme, 10)
    key_id = await db.fetchval("SELECT id FROM api_keys")
    quotas = (("1day", 1000), (f"1hour@{key_id}", 9))
    verdicts = await pool.admit([submission(pool, acme), submission(pool, acme, quotas=quotas, api_key_id=key_id)])
    assert {verdict.outcome for verdict in verdicts} == {Admission.ACCEPTED}

    by_name = await explain("acme", **servers)
    by_id = await explain(acme, "-o", "json", **servers)

    assert (by_name.exit_code, by_name.stderr) == (0, "")
    assert [row["request_id"] for row in json.loads(by_id.stdout)["refusals"]] == [request_id]
    assert "free has 40 % of its base limits: 4 of 5 GPUs are healthy, capacity 320/s; " in by_name.stdout
    assert "Not healthy: w4 is cordoned (by ann: ticket 4711), last seen " in by_name.stdout
    document = json.loads(by_id.stdout)
    limits = {
        "key" if line["of"] == "key" else line["limit"]: (line["base"], line["of"], line["effective"], line["left"])
        for line in document["limits"]
    }
    assert limits["requests_per_second"] == (100.0, "tier free", 40.0, None)
    assert limits["burst"][:3] == (10.0, "own", 4.0)
    assert limits["tokens_per_minute"][:3] == (60_000.0, "tier free", 24_000.0)
    assert limits["quota per day"] == (1000.0, "quotas", 1000.0, 998.0)
    assert limits["key"] == (9.0, "key", 9.0, 8.0)
    assert f"key {key_id} quota per hour" in by_name.stdout
    assert "8 (1 used; resets in " in by_name.stdout
    assert (document["models"], list(document["key_models"].values())) == (["tiny", "large"], [["tiny"]])
    assert "Only models tiny, large." in by_name.stdout
    assert "only models tiny." in by_name.stdout
    assert "also at most 9 requests per hour." in by_name.stdout
    assert (document["customer"], document["customer_id"], document["not_read"]) == ("acme", acme, [])
    assert document["capacity"]["rates"] == [100.0] * 4
    assert [each["id"] for each in document["failed"]] == failed[1:7:2]
    assert by_name.stdout.splitlines()[-2].split()[2:] == [failed[5], "gpu_timeout"]


async def test_a_suspended_customer(servers: dict[str, str], db: Any, acme: str) -> None:
    """It says who suspended it, and when; a later change of another column does not count."""
    async with db.transaction():
        await db.execute("SELECT set_config('tierlane.actor', 'ann', true)")
        await db.execute("UPDATE customers SET status = 'suspended'")
    await db.execute("UPDATE customers SET burst = 9")

    shown = (await explain(acme, **servers)).stdout
    assert "acme is suspended, by ann at 20" in shown


async def test_a_customer_and_a_request_that_wait(pool: Pool, servers: dict[str, str], db: Any, acme: str) -> None:
    """The weight, share of GPU time, backlog and debt of the customer; the position of requests in queue and backlog."""
    found = [submission(pool, acme, burst=50.0) for _ in range(5)]
    await pool.admit(found, [TierLimit("free", 1e6, 1e6, 1000, ["free"], places=2)])
    await pool.client.zincrby(pool.keys.backlogs("free"), 7.5, acme)
    await db.execute("UPDATE customers SET weight = 2")
    for owner, cost_ms in ((acme, 10.0), (str(uuid4()), 30.0)):
        await db.execute(
            "INSERT INTO requests (id, created_at, customer_id, tier, status, cost_ms) VALUES ($1, now(), $2, 'free', 'completed', $3)",
            new_request_id(), owner, cost_ms,
        )  # fmt: skip

    shown = (await explain("acme", **servers)).stdout
    assert "Weight 2; share of the tier's GPU time in the last minute: 25 %." in shown
    assert "Queue free: 3 requests wait in its backlog; debt 15 ms of GPU time." in shown
    assert "Position 2 of 2 in the tier queue." in (await explain(found[1].id, **servers)).stdout
    document = json.loads((await explain(found[4].id, "-o", "json", **servers)).stdout)
    assert [document["facts"][name] for name in ("queue", "place", "of", "in_backlog")] == ["free", 3, 3, True]


async def test_an_accepted_request(pool: Pool, servers: dict[str, str], db: Any, acme: str) -> None:
    """While it is queued or runs it is read from Redis, afterwards from the audit."""
    (request_id,) = await pool.queue(1, customer_id=acme)

    assert "Accepted; queued" in (await explain(request_id, **servers)).stdout

    await pool.form([("free", 1)])
    batch = await pool.claim_next("w7")
    assert "Accepted; in a batch, after 1 run begun." in (await explain(request_id, **servers)).stdout
    await pool.batches.finish(batch.batch_id, batch.token, [done(request_id)])
    async with running(auditor_for(servers["database_url"], pool.client)):

        async def written() -> bool:
            return bool(await db.fetchval("SELECT count(*) FROM requests WHERE status = 'completed'"))

        await eventually(written, "the row is written")
    await pool.client.delete(pool.keys.request(request_id))

    shown = await explain(request_id, **servers)
    document = json.loads((await explain(request_id, "-o", "json", **servers)).stdout)

    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[2].startswith("Completed after ")
    assert (document["facts"]["worker_id"], document["facts"]["customer_id"]) == ("w7", acme)
    assert [event["event"] for event in document["timeline"]] == ["accepted", "batched", "completed"]


async def test_unknown_names(servers: dict[str, str]) -> None:
    """Exit code 1, where it was searched, and what to do; control characters are escaped, and a key is not repeated."""
    unknown = new_request_id()

    request = await explain(unknown, **servers)
    customer = await explain("nobody\x1b", **servers)

    assert (request.exit_code, request.stdout, customer.exit_code, customer.stdout) == (1, "", 1, "")
    assert f"{unknown}\n\nThis request is not known.\nNo row of the audit, no request in Redis" in request.stderr
    assert "There is no customer with the name or id nobody\\x1b," in customer.stderr
    assert "secret" not in (await explain("tl_abc_secret", **servers)).stderr


async def test_a_worker_is_no_customer(pool: Pool, servers: dict[str, str]) -> None:
    """The error says that it is a worker, and which verb shows it."""
    await pool.worker_beats("w1")
    shown = await explain("w1", **servers)

    assert shown.exit_code == 1
    assert "w1 is a worker: `tierlane gpu list` shows its state" in shown.stderr


@pytest.mark.parametrize(
    ("url", "reason"), [(NO_REDIS, "Redis did not respond: "), ("", "TIERLANE_REDIS_URL is not set")]
)
async def test_without_redis(database_url: str, acme: str, url: str, reason: str) -> None:
    """Base limits are shown, with a sentence on what could not be read."""
    shown = await explain("acme", redis_url=url, database_url=database_url)

    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[-1].startswith(reason)
    assert ["burst", "10", "own", "-", "-"] in [line.split() for line in shown.stdout.splitlines()]


async def test_without_postgresql(pool: Pool, redis_url: str) -> None:
    """The state of the tiers is shown, and rejections by id. No password is printed. Without Redis too it is exit code 1."""
    customer_id = "0197f3a0-0000-7000-8000-000000000001"
    await pool.worker_beats("w1")
    request_id = await reject(pool, customer_id)
    names = ("acme", customer_id, request_id)

    by_name, by_id, request = [await explain(name, redis_url=redis_url, database_url=NO_POSTGRES) for name in names]

    assert "free has 40 % of its base limits: 1 of 1 GPU is healthy" in by_name.stdout
    assert request_id in by_id.stdout
    assert "Rejected with reduced_capacity at " in request.stdout
    for shown in (by_name, by_id, request):
        assert (shown.exit_code, "hunter2" in shown.stdout) == (0, False)
        assert shown.stdout.splitlines()[-1].startswith("PostgreSQL at ")
    shown = await explain("acme", "--output", "json", redis_url=redis_url, database_url=NO_POSTGRES)
    known = json.loads(shown.stdout)
    assert (known["cells"], known["tiers"][0]["guaranteed_share"]) == ([], None)
    for name in ("acme", request_id):
        shown = await explain(name, redis_url=NO_REDIS, database_url=NO_POSTGRES)
        assert (shown.exit_code, shown.stdout) == (1, "")
        assert [line.partition(" ")[0] for line in shown.stderr.splitlines()] == ["PostgreSQL", "Redis"]
