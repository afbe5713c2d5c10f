"""`tierlane dlq list`, `show` and `purge` on real servers: what an operator sees, and what is deleted."""

import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.auditor_bench import KEYS, auditor_for, running
from integration.dlq_bench import command, customer, letter
from integration.ledger_fixtures import database_url, db, postgres_server
from pool import Pool
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.batches import Outcome

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


def ids_of(table: str) -> list[str]:
    return [line.split()[0] for line in table.splitlines() if line.startswith("req_")]


async def test_the_list_is_newest_first_and_bounded(database_url: str, db: Connection) -> None:
    """One line each, with everything but the input."""
    acme = await customer(db)
    old = await letter(db, 20, customer_id=acme, error_code="poison_request", requeued_as=None)
    new = await letter(db, 10, text="a secret")
    newest = await letter(db, 5, body=None, worker_ids=[])

    shown = await command("list", database_url=database_url)
    bounded = await command("list", "--limit", "2", database_url=database_url)

    assert (shown.exit_code, shown.stderr) == (0, "")
    assert ids_of(shown.stdout) == [newest, new, old]
    assert ids_of(bounded.stdout) == [newest, new]
    assert "acme" in shown.stdout
    assert "poison_request" in shown.stdout
    assert "w1, w2, w3" in shown.stdout
    assert "secret" not in shown.stdout


@pytest.mark.parametrize("by", ["--customer=acme", "--customer=<id>", "--code=poison_request"])
async def test_the_list_can_be_narrowed(database_url: str, db: Connection, by: str) -> None:
    """By the name or id of a customer, by code."""
    acme = await customer(db)
    wanted = await letter(db, customer_id=acme, error_code="poison_request")
    await letter(db)

    shown = await command("list", by.replace("<id>", acme), database_url=database_url)

    assert ids_of(shown.stdout) == [wanted]


async def test_the_list_as_json(database_url: str, db: Connection) -> None:
    """For programs: one array, names as in the table; still no input."""
    acme = await customer(db)
    request_id = await letter(db, customer_id=acme, text="a secret")

    shown = await command("list", "-o", "json", database_url=database_url)
    same = await command("list", database_url=database_url, env={"TIERLANE_DLQ_OUTPUT": "json"})

    (row,) = json.loads(shown.stdout)
    assert row.pop("dead_at").endswith("Z")
    assert row.pop("body_bytes") > 10
    assert row == {
        "request_id": request_id,
        "customer_id": acme,
        "customer": "acme",
        "tier": "paid",
        "model": "tiny",
        "error_code": "worker_lost",
        "attempts": 3,
        "worker_ids": ["w1", "w2", "w3"],
        "requeued_as": None,
        "requeued_at": None,
    }
    assert same.stdout == shown.stdout


async def test_an_empty_list_says_so(database_url: str) -> None:
    """In words for people, as an empty array for programs."""
    assert (await command("list", database_url=database_url)).stdout == "No dead letters.\n"
    assert (await command("list", "-o", "json", database_url=database_url)).stdout == "[]\n"


async def test_show_tells_all_but_the_input(database_url: str, db: Connection) -> None:
    """Size, model and the beginning of a digest say enough to tell two inputs apart."""
    acme = await customer(db)
    request_id = await letter(db, customer_id=acme, text="a secret")

    shown = await command("show", request_id, database_url=database_url)
    as_json = json.loads((await command("show", request_id, "-o", "json", database_url=database_url)).stdout)

    assert shown.exit_code == 0
    for expected in (request_id, f"acme ({acme})", "worker_lost", "w1, w2, w3", "requeued  no"):
        assert expected in shown.stdout
    body = as_json["body"]
    assert f"{body['bytes']} bytes for tiny, sha256 {body['sha256']}" in shown.stdout
    assert (set(body), len(body["sha256"])) == ({"bytes", "model", "sha256"}, 8)
    assert "secret" not in shown.stdout + str(as_json)


async def test_show_prints_the_input_when_asked(database_url: str, db: Connection) -> None:
    """Harmless for a terminal, byte by byte for programs."""
    hostile = "two\nlines \x1b[2J\u202e and a bell \x07"
    request_id = await letter(db, text=hostile)

    shown = await command("show", request_id, "--body", database_url=database_url)
    as_json = json.loads((await command("show", request_id, "--body", "-o", "json", database_url=database_url)).stdout)

    assert shown.stdout.endswith("\n\ntwo\nlines \\x1b[2J\\u202e and a bell \\x07\n")
    assert (as_json["body"]["input"], as_json["body"]["parameters"]) == (hostile, {"n": 1})


@pytest.mark.parametrize(("body", "said"), [(None, "not kept"), (b"\xc1", "1 bytes for an unknown model")])
async def test_show_bears_a_body_that_is_missing_or_broken(
    database_url: str, db: Connection, body: bytes | None, said: str
) -> None:
    """It says so, and goes on."""
    request_id = await letter(db, body=body)

    shown = await command("show", request_id, "--body", database_url=database_url)

    assert said in shown.stdout
    assert shown.stdout.endswith("There is no readable input.\n")


async def test_an_unknown_id_is_one_sentence(database_url: str) -> None:
    """And exit code 1."""
    shown = await command("show", "req_x\x1b", database_url=database_url)

    assert (shown.exit_code, shown.stdout, shown.stderr) == (1, "", "There is no dead letter req_x\\x1b.\n")


async def test_purge_deletes_ids_from_both_places(
    client: Redis, redis_url: str, database_url: str, db: Connection
) -> None:
    """Those named, and no other; what was not there is told."""
    first, second, third = [await letter(db) for _ in range(3)]
    await client.lpush(KEYS.dlq, first, second, third)

    done = await command("purge", first, third, first, "req_x", redis_url=redis_url, database_url=database_url)

    assert done.exit_code == 1
    assert (done.stdout, done.stderr) == ("Deleted 2 dead letters.\n", "There is no dead letter req_x.\n")
    assert await db.fetchval("SELECT array_agg(request_id) FROM dead_letters") == [second]
    assert await client.lrange(KEYS.dlq, 0, -1) == [second.encode()]


@pytest.mark.parametrize(("choice", "left"), [(["--older-than", "7d"], 1), (["--all"], 0)])
async def test_purge_of_many_asks_before(
    client: Redis, redis_url: str, database_url: str, db: Connection, choice: list[str], left: int
) -> None:
    """It says how many; no answer and no are no."""
    for age_s in (0, 8 * 86_400):
        await client.lpush(KEYS.dlq, await letter(db, age_s))
    servers = {"redis_url": redis_url, "database_url": database_url}

    for said in ("", "n\n"):
        refused = await command("purge", *choice, input=said, **servers)
        assert refused.exit_code == 1
        assert ("2 dead letters" if left == 0 else "1 dead letter") in refused.stdout
    assert await db.fetchval("SELECT count(*) FROM dead_letters") == 2

    done = await command("purge", *choice, input="y\n", **servers)

    assert done.exit_code == 0
    assert await db.fetchval("SELECT count(*) FROM dead_letters") == await client.llen(KEYS.dlq) == left
    assert (await command("purge", *choice, "--yes", **servers)).stdout == "Deleted 0 dead letters.\n"


@pytest.mark.parametrize("away", ["", "unix:///nonexistent/redis.sock"])
async def test_purge_goes_on_without_redis(database_url: str, db: Connection, away: str) -> None:
    """The rows are what matters; that the list keeps its ids is a warning."""
    await letter(db)

    done = await command("purge", "--all", "--yes", redis_url=away, database_url=database_url)

    assert (done.exit_code, done.stdout) == (0, "Deleted 1 dead letter.\n")
    assert done.stderr.startswith("Warning: ")
    assert done.stderr.count("\n") == 1
    assert await db.fetchval("SELECT count(*) FROM dead_letters") == 0


async def test_without_postgres_it_is_one_sentence() -> None:
    """No password, no traceback."""
    url = "postgresql+asyncpg://user:hunter2@/lane?host=/nonexistent"

    shown = await command("list", database_url=url)

    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.startswith("PostgreSQL at ")
    assert shown.stderr.count("\n") == 1
    assert "hunter2" not in shown.stderr


async def test_the_local_stack_is_the_default(database_url: str, db: Connection, tmp_path: Path) -> None:
    """Beside `tierlane up` nothing has to be set; what is set wins, and is never mixed with half of the local stack."""
    request_id = await letter(db)
    stack = {
        "redis_url": "unix:///nonexistent",
        "database_url": database_url,
        "service_token": "t" * 16,
        "http_url": "",
    }
    (tmp_path / "stack.json").write_text(json.dumps(stack))
    other = {"TIERLANE_DATA_DIR": str(tmp_path)}

    assert ids_of((await command("list", "--data-dir", str(tmp_path))).stdout) == [request_id]
    assert ids_of((await command("list", env=other)).stdout) == [request_id]
    mixed = await command("list", env=other, redis_url="unix:///elsewhere")
    (tmp_path / "stack.json").write_text("{")
    none = await command("list", env=other)

    for refused in (mixed, none):
        assert refused.exit_code == 2
        assert refused.stderr.startswith("TIERLANE_DATABASE_URL: is not set, and no local stack runs in ")


async def test_what_the_scripts_bury_is_what_the_operator_sees(pool: Pool, database_url: str, db: Connection) -> None:
    """From the input that breaks a model, through Lua's packing and the outbox, to the screen."""
    acme = await customer(db)
    text = "a\x00b ☃ " * 50
    (request_id,) = await pool.queue(1, "paid", customer_id=acme, body=encode_payload(Payload("tiny", text, {})))
    await pool.form([("paid", 1)])
    batch = await pool.claim_next("w7")
    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(request_id, "poison_request", 50.0, 0, "v1", "")])
    async with running(auditor_for(database_url, pool.client)):

        async def is_there() -> bool:
            return bool(await db.fetchval("SELECT count(*) FROM dead_letters"))

        await eventually(is_there, "the letter is written")

    shown = json.loads((await command("show", request_id, "--body", "-o", "json", database_url=database_url)).stdout)

    assert (shown["customer"], shown["error_code"], shown["attempts"]) == ("acme", "poison_request", 1)
    assert (shown["worker_ids"], shown["body"]["input"]) == (["w7"], text)
