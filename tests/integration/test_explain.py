"""`tierlane explain` on real servers: a customer that was admitted and refused, requests of every kind, servers away."""

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner, Result

from eventually import eventually
from gateway.limits.rejections import RejectionLog
from integration.auditor_bench import auditor_for, running
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.snapshot import Identity
from pool import Pool, done
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Submission
from scheduler.protocol.pool_view import GatewayStats, TierStats
from scheduler.redis_client.keys import Keys
from scheduler.request_id import new_request_id
from scheduler.states import Admission
from tierlane.explain.command import app

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
NOWHERE = "postgresql+asyncpg://user:hunter2@/lane?host=/nonexistent"
NO_REDIS = "unix:///nonexistent/redis.sock"


async def command(*arguments: str, redis_url: str = "", database_url: str = "") -> Result:
    """Run `tierlane explain` with these arguments; settings and a stack of this machine are out of reach."""
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


async def customer(db: Connection) -> str:
    """Acme of tier free, with a burst of its own, two quotas and a key with a limit; its id."""
    await db.execute("INSERT INTO models (name, rps_per_gpu, target_utilization) VALUES ('tiny', 50, 0.8)")
    await db.execute("UPDATE tiers SET requests_per_second = 100, burst = 40, tokens_per_minute = 60000")
    acme: str = await db.fetchval(
        "INSERT INTO customers (name, tier, burst) VALUES ('acme', 'free', 10) RETURNING id::text"
    )
    await db.execute("INSERT INTO customers (name, tier) VALUES ('other', 'paid')")
    await db.execute("INSERT INTO quotas (customer_id, quota) VALUES ($1, '1000/day')", acme)
    await db.execute("INSERT INTO quotas (tier, quota) VALUES ('free', '90000/month')")
    await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    await db.execute("UPDATE api_keys SET requests_per_second = 20, burst = 5")
    return acme


def stats(factor: float = 0.4) -> GatewayStats:
    tiers = {
        "enterprise": TierStats(200.0, 0.0, 80.0, 1.0, 200.0),
        "paid": TierStats(88.0, 0.0, 80.0, 1.0, 88.0),
        "free": TierStats(80.0, 9.0, 80.0, factor, 32.0),
    }
    return GatewayStats("g1", 368.0, tiers, 320.0)


def submission(pool: Pool, customer_id: str, **changes: Any) -> Submission:
    """As the gateway would send it with free at 40 %."""
    quotas = (("1day", 1000), ("1month", 90_000))
    limits = {"rate": 40.0, "burst": 4.0, "tokens_per_minute": 24_000.0, "max_concurrency": 50, "quotas": quotas}
    return pool.submission(customer_id=customer_id, tokens=100, **limits | changes)


async def refuse(pool: Pool, customer_id: str, *codes: ErrorCode) -> list[str]:
    """As a gateway that refused these, and beats; their ids."""
    identity = Identity("k1", customer_id, "acme", "free", (100.0, 10.0, 50, 60_000), 2000)
    refusals, ids = RejectionLog(), [new_request_id() for _ in codes]
    for request_id, code in zip(ids, codes, strict=True):
        (verdict,) = await pool.admit([submission(pool, customer_id, rate=1e-9, burst=1e-9)])
        refusals.note(request_id, identity, RequestError(code), verdict, 0.4)
    await pool.presence.gateway_beat(stats(), refusals.drain())
    return ids


async def test_a_customer_is_taken_apart(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """Base limits out of PostgreSQL, factor and what is left out of Redis."""
    acme = await customer(db)
    for number in range(4):
        await pool.worker_beats(f"w{number}")
    await pool.worker_beats("w4", "down")
    await pool.presence.gateway_beat(stats())
    verdicts = await pool.admit([submission(pool, acme), submission(pool, acme)])
    assert {verdict.outcome for verdict in verdicts} == {Admission.ACCEPTED}

    shown = await command("acme", redis_url=redis_url, database_url=database_url)
    by_id = await command(acme, "-o", "json", redis_url=redis_url, database_url=database_url)

    assert (shown.exit_code, shown.stderr) == (0, "")
    assert (
        "free has 40 % of its base limits: 4 of 5 GPUs are healthy, capacity 320/s; enterprise 200/s and paid 88/s are "
        "served first; the demand of free is 80/s, and it gets 32/s (its guaranteed share)." in shown.stdout
    )
    document = json.loads(by_id.stdout)
    limits = {line["limit"]: (line["base"], line["of"], line["effective"], line["left"]) for line in document["limits"]}
    assert limits.pop("burst")[:3] == (10.0, "own", 4.0)
    assert limits.pop("tokens_per_minute")[:3] == (60_000.0, "tier free", 24_000.0)
    (key,) = {name.split()[1] for name in limits if name.startswith("key ")}
    assert limits == {
        "requests_per_second": (100.0, "tier free", 40.0, None),
        "max_concurrency": (
            limits["max_concurrency"][0],
            "tier free",
            limits["max_concurrency"][0],
            limits["max_concurrency"][0] - 2,
        ),
        "quota per day": (1000.0, "quotas", 1000.0, 998.0),
        "quota per month": (90_000.0, "quotas", 90_000.0, 89_998.0),
        f"key {key} requests_per_second": (20.0, "key", 8.0, None),
        f"key {key} burst": (5.0, "key", 2.0, None),
    }
    assert (document["customer"], document["customer_id"], document["not_read"]) == ("acme", acme, [])
    assert document["capacity"]["rates"] == [100.0] * 4


async def test_the_last_refusals_of_a_customer(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """The newest first, no more than asked for, of nobody else."""
    acme = await customer(db)
    first, second = await refuse(pool, acme, ErrorCode.REDUCED_CAPACITY, ErrorCode.RATE_LIMIT_EXCEEDED)
    await refuse(pool, "somebody else", ErrorCode.RATE_LIMIT_EXCEEDED)

    shown = await command("acme", redis_url=redis_url, database_url=database_url)
    one = await command("acme", "--refusals", "1", "-o", "json", redis_url=redis_url, database_url=database_url)

    rows = [line.split() for line in shown.stdout.splitlines() if "req_" in line]
    assert [(row[2], row[3]) for row in rows] == [(second, "rate_limit_exceeded"), (first, "reduced_capacity")]
    assert [refusal["request_id"] for refusal in json.loads(one.stdout)["refusals"]] == [second]


async def test_a_refused_request(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """Which limit refused it, with its figures then, though its gateway is dead."""
    (request_id,) = await refuse(pool, await customer(db), ErrorCode.REDUCED_CAPACITY)
    await pool.client.delete(pool.keys.gateways, pool.keys.gateway("g1"))

    shown = await command(request_id, redis_url=redis_url, database_url=database_url)

    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "Rejected with reduced_capacity at " in shown.stdout
    assert "by the customer's limit over all its keys: 40 requests/s (burst 4) in force" in shown.stdout
    assert "The limits of tier free were at 40 % of their base" in shown.stdout


async def test_an_accepted_request(pool: Pool, redis_url: str, database_url: str, db: Connection) -> None:
    """While it runs out of Redis, afterwards out of the audit, which knows more."""
    acme = await customer(db)
    (waiting,) = await pool.queue(1, customer_id=acme)
    servers = {"redis_url": redis_url, "database_url": database_url}

    assert "Accepted; queued" in (await command(waiting, **servers)).stdout

    await pool.form([("free", 1)])
    batch = await pool.claim_next("w7")
    assert "Accepted; in a batch, after 1 run begun." in (await command(waiting, **servers)).stdout
    await pool.batches.finish(batch.batch_id, batch.token, [done(waiting)])
    async with running(auditor_for(database_url, pool.client)):

        async def is_there() -> bool:
            return bool(await db.fetchval("SELECT count(*) FROM requests WHERE status = 'completed'"))

        await eventually(is_there, "the row is written")
    await pool.client.delete(pool.keys.request(waiting))

    shown = await command(waiting, **servers)
    document = json.loads((await command(waiting, "-o", "json", **servers)).stdout)

    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[2].startswith("Completed after ")
    assert (document["facts"]["worker_id"], document["facts"]["customer_id"]) == ("w7", acme)
    assert [event["event"] for event in document["timeline"]] == ["accepted", "batched", "completed"]


async def test_what_is_not_known_is_one_sentence(redis_url: str, database_url: str) -> None:
    """And exit code 1."""
    servers = {"redis_url": redis_url, "database_url": database_url}
    unknown = new_request_id()

    request = await command(unknown, **servers)
    nobody = await command("nobody\x1b", **servers)

    assert (request.exit_code, request.stdout) == (1, "")
    assert f"{unknown} is not known. Rejections are kept for 10 min" in request.stderr
    assert (nobody.exit_code, nobody.stdout) == (1, "")
    assert nobody.stderr == "There is no customer nobody\\x1b, and it is not a request id.\n"


async def test_without_redis_the_rows_are_told(database_url: str, db: Connection) -> None:
    """Base limits, and one sentence on the rest."""
    await customer(db)

    for url, why in ((NO_REDIS, "Redis did not respond: "), ("", "TIERLANE_REDIS_URL is not set")):
        shown = await command("acme", redis_url=url, database_url=database_url)

        assert (shown.exit_code, shown.stderr) == (0, "")
        last = shown.stdout.splitlines()[-1]
        assert last.startswith(why)
        assert last.endswith(", so factors, what is left, and rejections could not be read.")
        assert ["burst", "10", "own", "-", "-"] in [line.split() for line in shown.stdout.splitlines()]


async def test_without_postgres_what_is_seen_is_told(pool: Pool, redis_url: str) -> None:
    """How every tier stands; by id the refusals too. No password, no traceback."""
    acme = "0197f3a0-0000-7000-8000-000000000001"
    await pool.worker_beats("w1")
    (request_id,) = await refuse(pool, acme, ErrorCode.REDUCED_CAPACITY)
    away = {"redis_url": redis_url, "database_url": NOWHERE}

    by_name, by_id, request = [await command(asked, **away) for asked in ("acme", acme, request_id)]

    assert [shown.exit_code for shown in (by_name, by_id, request)] == [0, 0, 0]
    assert "free has 40 % of its base limits: 1 of 1 GPU is healthy" in by_name.stdout
    assert request_id in by_id.stdout
    assert "Rejected with reduced_capacity at " in request.stdout
    for shown in (by_name, by_id, request):
        assert shown.stdout.splitlines()[-1].startswith("PostgreSQL at ")
        assert "hunter2" not in shown.stdout


@pytest.mark.parametrize("asked", ["acme", "req_0197f3a0000070008000000000000001"])
async def test_without_both_it_is_a_failure(asked: str) -> None:
    """A sentence each."""
    shown = await command(asked, redis_url=NO_REDIS, database_url=NOWHERE)

    assert (shown.exit_code, shown.stdout) == (1, "")
    assert [line.partition(" ")[0] for line in shown.stderr.splitlines()] == ["PostgreSQL", "Redis"]


async def test_another_pool_is_another_story(client: Redis, redis_url: str, database_url: str, db: Connection) -> None:
    """Its gateways and refusals are its own."""
    acme = await customer(db)
    other = Pool(client, Keys("embeddings"))
    (request_id,) = await refuse(other, acme, ErrorCode.REDUCED_CAPACITY)
    servers = {"redis_url": redis_url, "database_url": database_url}

    here = await command("acme", **servers)
    there = await command("acme", "--pool", "embeddings", **servers)

    assert "No gateway is running" in here.stdout
    assert (request_id in here.stdout, request_id in there.stdout) == (False, True)
