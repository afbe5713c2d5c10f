"""Evidence from real servers: rows of the run's customers, what Redis still holds, the log of runs, open files."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from redis.asyncio import Redis

from integration.ledger_fixtures import database_url, db, postgres_server
from scheduler.request_id import created_at, new_request_id
from tierlane.chaos.checker.evidence import collect, compared, open_files
from tierlane.chaos.history import LoadCustomer, Sources

__all__ = ["database_url", "db", "postgres_server"]

OURS = LoadCustomer(tier="free", id=str(uuid4()), name="ours", key="k")
THEIRS = str(uuid4())
INSERT = """
INSERT INTO requests (id, created_at, customer_id, tier, status, completed_at, http_status, attempts, trace_id, worker_id)
VALUES ($1, $2, $3::text::uuid, 'free', 'completed', $2, 200, 2, $4, 'worker-1')
"""
NOWHERE = "redis://127.0.0.1:1/0"


async def insert(db: Any, customer: str | None, at: datetime | None = None) -> str:
    request_id = new_request_id()
    await db.execute(INSERT, request_id, at or created_at(request_id), customer, "ab" * 16)
    return request_id


def sources(database_url: str, redis_url: str, runs: Path | None = None) -> Sources:
    return Sources(database_url, redis_url, runs, started_at=time.time() - 1)


async def test_the_rows_of_the_run(database_url: str, redis_url: str, db: Any) -> None:
    """Those of its customers, and those of nobody, since it was begun."""
    mine, nobodys = await insert(db, OURS.id), await insert(db, None)
    await insert(db, THEIRS)
    await insert(db, OURS.id, datetime(2026, 1, 1, tzinfo=UTC))
    found = await collect(sources(database_url, redis_url), [OURS])

    assert found.errors == ()
    assert {row.id for row in found.rows} == {mine, nobodys}
    row = next(row for row in found.rows if row.id == mine)
    assert (row.customer, row.tier, row.status, row.code) == (OURS.id, "free", "completed", "")
    assert (row.trace, row.attempts, row.http_status, row.worker_id) == ("ab" * 16, 2, 200, "worker-1")
    assert row.ended_ms is not None
    assert abs(row.ended_ms / 1000 - found.wall_offset_s - time.monotonic()) < 5.0
    assert found.runs is None


async def test_an_idle_redis_holds_nothing(database_url: str, redis_url: str, client: Redis) -> None:
    """Ended requests and the permanent keys are no leftovers."""
    await client.hset("request:req_1", mapping={"state": "completed"})
    await client.pexpire("request:req_1", 60_000)
    await client.set("epoch", 1)
    found = await collect(sources(database_url, redis_url), [OURS])

    assert found.leftovers.settled
    assert found.leftovers.leaked_keys == ()


async def test_what_redis_still_holds(database_url: str, redis_url: str, client: Redis) -> None:
    """Open requests, lists that are not empty, leases, and a key that would stay for ever."""
    for number, state in enumerate(("queued", "processing", "failed")):
        await client.hset(f"request:req_{number}", mapping={"state": state})
        await client.pexpire(f"request:req_{number}", 60_000)
    for key in ("queue:free", "batch_queue", "outbox", "outbox:a", "inflight:free:b"):
        await client.lpush(key, "x")
        if key.startswith("inflight"):
            await client.pexpire(key, 60_000)
    await client.zadd("leases", {"b": 1})
    await client.set("forgotten", 1)
    left = (await collect(sources(database_url, redis_url), [OURS])).leftovers
    await client.delete("forgotten")

    assert left.open_requests == ("req_0", "req_1")
    assert {key for key, length in left.lengths.items() if length == 1} == {
        "queue:free",
        "batch_queue",
        "outbox",
        "outbox:a",
        "inflight:free:b",
        "leases",
    }
    assert left.leaked_keys == ("forgotten",)


async def test_the_log_of_runs(database_url: str, redis_url: str, tmp_path: Path) -> None:
    """Of all processes; a cut last line and what is no request of the load are left out."""
    lines = [
        json.dumps({"nonce": "a", "sent": 1.0, "began": 1.5}),
        json.dumps({"nonce": "", "sent": None, "began": 2.0}),
    ]
    (tmp_path / "1-1.jsonl").write_text("\n".join(lines) + '\n{"nonce": "b", "se')
    (tmp_path / "2-1.jsonl").write_text(lines[0] + "\n")
    runs = (await collect(sources(database_url, redis_url, tmp_path), [OURS])).runs

    assert runs is not None
    assert [(run.nonce, run.began, run.process) for run in runs] == [("a", 1.5, "1-1"), ("a", 1.5, "2-1")]


async def test_servers_that_are_away_are_told() -> None:
    """A sentence each, so that the checker proves nothing by their absence."""
    away = sources("postgresql+asyncpg://nobody@127.0.0.1:1/none", NOWHERE)
    found = await collect(away, [OURS], unfinished="Not drained: 3 open rows.")

    assert [error.split(":")[0] for error in found.errors] == [
        "Not drained",
        "The audit cannot be read",
        "Redis cannot be read",
    ]


def test_open_files_of_those_that_lived_through(tmp_path: Path) -> None:
    """Of a process that was there before and after; one that is gone or new says nothing."""
    me = psutil.Process()
    before = open_files([("me", me)])
    with (tmp_path / "one").open("w"), (tmp_path / "two").open("w"):
        counts = compared({**before, ("gone", 1, 0.0): 5}, open_files([("me", me)]))
    assert [(one.process, one.after - one.before) for one in counts] == [(f"me ({me.pid})", 2)]
