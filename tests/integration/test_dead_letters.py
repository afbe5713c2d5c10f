"""`tierlane dlq` with real servers: list, show, purge and requeue."""

import asyncio
import re
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from configs import REPLAYS
from eventually import eventually
from integration.admin_fixtures import Admin
from integration.audit_fixtures import audit
from integration.dashboard_fixtures import record
from integration.dead_letter_fixtures import customer, letter, worker
from integration.ledger_fixtures import database_url, db, dsn, postgres_server
from ledger.audit.queries import find_request
from ledger.dead_letters import find_letter, mark_requeued, unmark_requeued
from pool import Pool, done
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.admission import Admissions
from scheduler.protocol.batches import Outcome
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.request_id import new_request_id
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
RERUN = re.compile(r"(req_[0-9a-f]{32}) -> (req_[0-9a-f]{32}): (.*)\n")


@pytest.fixture
def admin(database_url: str, redis_url: str) -> Admin:
    return Admin(database_url, TIERLANE_REDIS_URL=redis_url, TIERLANE_TOTAL_REQUEST_MS="3100")


@pytest.fixture
async def acme(db: Connection) -> str:
    """The id of a customer `acme` of the tier paid, whose model is enabled."""
    return await customer(db)


def poison(request_id: str) -> Outcome:
    return Outcome(request_id, "poison_request", 50.0, 0, "v1", "It broke.")


async def requeued_as(db: Connection) -> str | None:
    request_id: str | None = await db.fetchval("SELECT requeued_as FROM dead_letters")
    return request_id


async def test_dead_letters_are_listed(admin: Admin, db: Connection, acme: str) -> None:
    """The newest first, limited or filtered by code and customer, with all columns but the input."""
    assert await admin.done("dlq", "list") == "No dead letters.\n"
    old = await letter(db, 20, customer_id=acme, error_code="poison_request", text="a secret")
    new, newest = await letter(db, 10), await letter(db, 5, body=None, worker_ids=[])

    async def ids(*options: str) -> list[str]:
        return [row["request_id"] for row in await admin.json("dlq", "list", *options)]

    assert await ids() == [newest, new, old]
    assert await ids("--limit", "2") == [newest, new]
    for option in ("--customer=acme", f"--customer={acme}", "--code=poison_request"):
        assert await ids(option) == [old]
    output = await admin.done("dlq", "list")
    assert [line.split()[0] for line in output.splitlines() if line.startswith("req_")] == [newest, new, old]
    row = (await admin.json("dlq", "list"))[2]
    assert "secret" not in output + str(row)
    assert row.pop("dead_at").endswith("Z")
    assert row.pop("body_bytes") > 10
    assert row == {
        "request_id": old,
        "customer_id": acme,
        "customer": "acme",
        "tier": "paid",
        "model": "tiny",
        "error_code": "poison_request",
        "attempts": 3,
        "worker_ids": ["w1", "w2", "w3"],
        "requeued_as": None,
        "requeued_at": None,
    }


async def test_show_prints_the_input_only_with_the_option(admin: Admin, db: Connection, acme: str) -> None:
    """Without --body there is a size and a digest; with it, control characters are escaped for a terminal."""
    hostile = "two\nlines \x1b[2J\u202e and a secret \x07"
    request_id = await letter(db, customer_id=acme, text=hostile)

    shown = await admin.done("dlq", "show", request_id)
    body = (await admin.json("dlq", "show", request_id))["body"]
    full = (await admin.json("dlq", "show", request_id, "--body"))["body"]

    for part in (request_id, f"acme ({acme})", "worker_lost", "w1, w2, w3", f"sha256 {body['sha256']}"):
        assert part in shown
    assert (set(body), len(body["sha256"])) == ({"bytes", "model", "sha256"}, 8)
    assert "secret" not in shown + str(body)
    text = await admin.done("dlq", "show", request_id, "--body")
    assert text.endswith("\n\ntwo\nlines \\x1b[2J\\u202e and a secret \\x07\n")
    assert (full["input"], full["parameters"]) == (hostile, {"n": 1})
    for unreadable in (None, b"\xc1"):
        output = await admin.done("dlq", "show", await letter(db, body=unreadable), "--body")
        assert output.endswith("There is no readable input.\n")
    assert await admin.fault(1, "dlq", "show", "req_x\x1b") == "There is no dead letter req_x\\x1b."


async def test_purge_deletes_ids_from_postgresql_and_redis(pool: Pool, admin: Admin, db: Connection) -> None:
    """Unknown ids are reported; the deletion is recorded with its actor."""
    first, second, third = [await letter(db) for _ in range(3)]
    await pool.client.lpush(pool.keys.dlq, first, second, third)

    result = await admin.run("dlq", "purge", first, third, first, "req_x", "--actor", "bob")

    assert (result.exit_code, result.stderr) == (1, "There is no dead letter req_x.\n")
    assert await db.fetchval("SELECT array_agg(request_id) FROM dead_letters") == [second]
    assert await pool.client.lrange(pool.keys.dlq, 0, -1) == [second.encode()]
    assert await record(db, "dead_letters") == [
        ("bob", "by id", {"count": 2, "request_ids": sorted([first, third])}, None)
    ]


@pytest.mark.parametrize(("choice", "left"), [(["--older-than", "7d"], 1), (["--all"], 0)])
async def test_purge_of_many_needs_a_confirmation(
    pool: Pool, admin: Admin, db: Connection, choice: list[str], left: int
) -> None:
    """The question has the number; no answer and `n` delete nothing."""
    for age_s in (0, 8 * 86_400):
        await pool.client.lpush(pool.keys.dlq, await letter(db, age_s))
    for answer in ("", "n\n"):
        refused = await admin.run("dlq", "purge", *choice, input=answer)
        assert refused.exit_code == 1
        assert f"{2 - left} dead letter" in refused.stdout
    assert await db.fetchval("SELECT count(*) FROM dead_letters") == 2

    assert (await admin.run("dlq", "purge", *choice, input="y\n")).exit_code == 0
    assert await db.fetchval("SELECT count(*) FROM dead_letters") == await pool.client.llen(pool.keys.dlq) == left
    assert await admin.done("dlq", "purge", *choice, "--yes") == "Deleted 0 dead letters.\n"


@pytest.mark.parametrize("redis_url", ["", "unix:///nonexistent/redis.sock"])
async def test_without_redis_purge_works_and_requeue_fails(database_url: str, db: Connection, redis_url: str) -> None:
    """Purge prints a warning, since the list in Redis keeps its ids."""
    away = Admin(database_url, TIERLANE_REDIS_URL=redis_url)
    request_id = await letter(db, customer_id=await customer(db))

    assert "redis" in (await away.fault(1, "dlq", "requeue", request_id)).lower()
    result = await away.run("dlq", "purge", "--all", "--yes")

    assert (result.exit_code, result.stderr.startswith("Warning: "), result.stderr.count("\n")) == (0, True, 1)
    assert await db.fetchval("SELECT count(*) FROM dead_letters") == 0


async def test_a_dead_letter_from_the_scripts_to_the_command(
    pool: Pool, admin: Admin, database_url: str, db: Connection, acme: str
) -> None:
    """An input that fails in the model is shown as it was sent, after Lua, the outbox and the auditor."""
    text = "a\x00b ☃ " * 50
    (request_id,) = await pool.queue(1, "paid", customer_id=acme, body=encode_payload(Payload("tiny", text, {})))
    await pool.form([("paid", 1)])
    batch = await pool.claim_next("w7")
    await pool.batches.finish(batch.batch_id, batch.token, [poison(request_id)])
    await audit(database_url, pool.client)

    shown = await admin.json("dlq", "show", request_id, "--body")

    assert (shown["customer"], shown["error_code"], shown["attempts"]) == ("acme", "poison_request", 1)
    assert (shown["worker_ids"], shown["body"]["input"]) == (["w7"], text)


async def test_a_requeued_dead_letter_runs_under_a_new_id(
    pool: Pool, admin: Admin, database_url: str, db: Connection
) -> None:
    """It runs in the present tier of its customer without limits; it is marked, recorded, audited, and not in the list."""
    acme = await customer(db, tier="enterprise")
    old = await letter(db, customer_id=acme, tier="free")
    await pool.client.lpush(pool.keys.dlq, old)

    async with worker(pool, done):
        output = await admin.done("dlq", "requeue", old, "--actor", "ann")

    match = RERUN.fullmatch(output)
    assert match is not None
    request_id, new, end = match.groups()
    assert request_id == old
    assert re.fullmatch(r"completed after \d+ ms and 1 run\.", end)
    assert await requeued_as(db) == new
    assert await record(db, "dead_letters") == [
        ("ann", "by id", {"requeued_as": {old: None}}, {"requeued_as": {old: new}})
    ]
    assert not await pool.client.exists(pool.keys.dlq)
    assert await pool.client.zcard(pool.keys.gateways) == 1  # That of the test; the command has left.
    assert [key async for key in pool.client.scan_iter("rl:*")] == []
    await audit(database_url, pool.client)
    row = await find_request(db, new)
    assert row is not None
    assert (row.customer_id, row.tier, row.status, row.api_key_id) == (acme, "enterprise", "completed", None)
    assert row.endpoint == "dlq"


async def test_many_dead_letters_are_requeued(pool: Pool, admin: Admin, db: Connection, acme: str) -> None:
    """Each result is printed once; a failure is a new dead letter, and the exit code is 1."""
    ids = [await letter(db, customer_id=acme) for _ in range(40)]

    def outcome(request_id: str) -> Outcome:
        return poison(request_id) if request_id.endswith(("0", "1", "2", "3")) else done(request_id)

    async with worker(pool, outcome):
        result = await admin.run("dlq", "requeue", *ids, ids[0], "req_x")

    reruns = RERUN.findall(result.stdout)
    failed = {new for _, new, _ in reruns if new[-1] in "0123"}
    assert sorted(old for old, _, _ in reruns) == sorted(ids)
    assert {end.split()[0] for _, new, end in reruns if new in failed} <= {"failed,"}
    assert {end.split()[0] for _, new, end in reruns if new not in failed} == {"completed"}
    assert {each.decode() for each in await pool.client.lrange(pool.keys.dlq, 0, -1)} == failed
    assert (result.exit_code, result.stderr) == (1, "There is no dead letter req_x.\n")


async def test_a_dead_letter_is_requeued_twice_only_with_the_option(
    pool: Pool, admin: Admin, db: Connection, acme: str
) -> None:
    """With --again it runs again, and is marked with the last request."""
    old = await letter(db, customer_id=acme)
    async with worker(pool, done):
        await admin.done("dlq", "requeue", old)
        first = await requeued_as(db)
        refused = await admin.fault(1, "dlq", "requeue", old)
        await admin.done("dlq", "requeue", old, "--again")

    assert refused.startswith(f"{old}: It was already requeued, as {first}")
    assert await requeued_as(db) not in (None, first)


@pytest.mark.parametrize(
    ("fields", "sql", "reason"),
    [
        ({"body": None}, "SELECT 1", "Its input was not stored."),
        ({"body": b"\xc1"}, "SELECT 1", "Its input cannot be read."),
        ({}, "DELETE FROM customers", "Its customer was deleted."),
        ({"customer_id": None}, "SELECT 1", "Its customer was deleted."),
        ({}, "UPDATE customers SET status = 'suspended'", "Its customer is suspended."),
        ({}, "UPDATE models SET enabled = false", "This pool has no enabled model 'tiny'"),
        ({}, "UPDATE models SET pool = 'other'", "This pool has no enabled model 'tiny'"),
    ],
)
async def test_a_dead_letter_that_cannot_run_is_rejected(
    pool: Pool, admin: Admin, db: Connection, acme: str, fields: dict[str, Any], sql: str, reason: str
) -> None:
    """The reason is one line; nothing is queued or marked."""
    old = await letter(db, **{"customer_id": acme} | fields)
    await db.execute(sql)
    await pool.worker_beats("w1")

    assert (await admin.fault(1, "dlq", "requeue", old)).startswith(f"{old}: {reason}")
    assert await pool.depth("paid") == 0
    assert await requeued_as(db) is None


async def test_requeue_without_a_healthy_worker_or_memory(pool: Pool, admin: Admin, db: Connection, acme: str) -> None:
    """Nothing is queued, and the dead letter is not marked."""
    old = await letter(db, customer_id=acme)
    await pool.worker_beats("w1", "starting")
    assert (await admin.fault(1, "dlq", "requeue", old)).startswith("No worker of pool default is healthy")
    await pool.worker_beats("w1")
    await pool.client.config_set("maxmemory", 1)
    try:
        assert "Redis is out of memory" in await admin.fault(1, "dlq", "requeue", old)
    finally:
        await pool.client.config_set("maxmemory", 0)

    assert await pool.depth("paid") == 0
    assert await requeued_as(db) is None


async def test_requeued_dead_letters_have_the_settings_of_gateways(
    database_url: str, redis_url: str, db: Connection, acme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their admission has the limits of stored replies and the interval of scheduler passes that were set."""
    given: list[dict[str, Any]] = []

    class NotedAdmissions(Admissions):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            given.append(options)
            super().__init__(*arguments, **options)

    monkeypatch.setattr("tierlane.operate.requeue.Admissions", NotedAdmissions)
    settings = {"TIERLANE_IDEMPOTENCY_MAX_ANSWERS": "7", "TIERLANE_REAP_MS": "50"}
    admin = Admin(database_url, TIERLANE_REDIS_URL=redis_url, **settings)

    await admin.fault(1, "dlq", "requeue", await letter(db, customer_id=acme))

    assert given == [{"replays": REPLAYS._replace(max_answers=7), "pass_ms": 50}]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_result_that_does_not_arrive_is_reported(
    tmp_path: Path, database_url: str, db: Connection, acme: str, *, killed: bool
) -> None:
    """Without a result in time, or with Redis lost meanwhile, the dead letter stays marked and is not run twice."""
    server = EmbeddedRedis(tmp_path, tmp_path / "socket", ephemeral=True)
    await server.start()
    pool = Pool(command_client(server.url), Keys())
    old = await letter(db, customer_id=acme)
    await pool.worker_beats("w1")
    admin = Admin(database_url, TIERLANE_REDIS_URL=server.url, TIERLANE_TOTAL_REQUEST_MS="3100")
    running = asyncio.create_task(admin.run("dlq", "requeue", old))

    async def is_queued() -> bool:
        return await pool.depth("paid") == 1

    await eventually(is_queued, "it is queued")
    if killed:
        server.kill()
    result = await running
    await pool.client.aclose()
    await server.stop()

    assert result.exit_code == 1
    assert re.search(r": no result within \d s; see the audit\.\n", result.stdout)
    assert await requeued_as(db) in result.stdout


async def test_of_two_operators_one_requeues(database_url: str, db: Connection) -> None:
    """Both have read the dead letter and try to mark it: one succeeds, and only its own mark can be removed."""
    old = await letter(db)
    other = await asyncpg.connect(dsn(database_url))
    read = await find_letter(db, old)
    assert read is not None
    mine, theirs = new_request_id(), new_request_id()

    marked = await asyncio.gather(mark_requeued(db, read, mine), mark_requeued(other, read, theirs))

    assert sorted(marked) == [False, True]
    winner, loser = (mine, theirs) if marked[0] else (theirs, mine)
    await unmark_requeued(db, read, loser)
    assert await requeued_as(db) == winner
    await unmark_requeued(db, read, winner)
    assert await find_letter(db, old) == read
    await other.close()
