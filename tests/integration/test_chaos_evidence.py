"""Evidence of a chaos run from real servers: audit rows, what Redis still holds, the log of runs, open files."""

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
from tierlane_tools.chaos.checker.collection import collect
from tierlane_tools.chaos.checker.open_files import compared, open_files
from tierlane_tools.chaos.history import LoadCustomer, Sources

__all__ = ["database_url", "db", "postgres_server"]

CUSTOMER = LoadCustomer(tier="free", id=str(uuid4()), name="load", key="k")
INSERT = """
INSERT INTO requests (id, created_at, customer_id, tier, status, completed_at, http_status, attempts, trace_id, worker_id)
VALUES ($1, $2, $3::text::uuid, 'free', 'completed', $2, 200, 2, $4, 'worker-1')
"""


async def insert(db: Any, customer: str | None, at: datetime | None = None) -> str:
    request_id = new_request_id()
    await db.execute(INSERT, request_id, at or created_at(request_id), customer, "ab" * 16)
    return request_id


def sources(database_url: str, redis_url: str, runs: Path | None = None) -> Sources:
    return Sources(database_url, redis_url, runs, started_at=time.time() - 1)


async def test_audit_rows_of_the_run(database_url: str, redis_url: str, db: Any) -> None:
    """Rows of its customers and rows without a customer are read, as far as they are of this run."""
    own, without_customer = await insert(db, CUSTOMER.id), await insert(db, None)
    await insert(db, str(uuid4()))
    await insert(db, CUSTOMER.id, datetime(2026, 1, 1, tzinfo=UTC))
    found = await collect(sources(database_url, redis_url), [CUSTOMER])

    assert (found.errors, found.runs) == ((), None)
    assert {row.id for row in found.rows} == {own, without_customer}
    row = next(row for row in found.rows if row.id == own)
    assert (row.customer, row.tier, row.status, row.code) == (CUSTOMER.id, "free", "completed", "")
    assert (row.trace, row.attempts, row.http_status, row.worker_id) == ("ab" * 16, 2, 200, "worker-1")
    assert row.ended_ms is not None
    assert abs(row.ended_ms / 1000 - found.wall_offset_s - time.monotonic()) < 5.0


async def test_leftovers_in_redis(database_url: str, redis_url: str, client: Redis) -> None:
    """Open requests, lists that are not empty, leases and keys without a TTL; permanent keys and ended requests not."""
    await client.set("epoch", 1)
    await client.hset("request:req_2", mapping={"state": "failed"})
    await client.pexpire("request:req_2", 60_000)
    assert (await collect(sources(database_url, redis_url), [CUSTOMER])).leftovers.settled

    for number, state in enumerate(("queued", "processing")):
        await client.hset(f"request:req_{number}", mapping={"state": state})
        await client.pexpire(f"request:req_{number}", 60_000)
    lists = {"queue:free", "batch_queue", "outbox", "outbox:a", "inflight:free:b"}
    for key in lists:
        await client.lpush(key, "x")
    await client.pexpire("inflight:free:b", 60_000)
    await client.zadd("leases", {"b": 1})
    await client.set("forgotten", 1)
    left = (await collect(sources(database_url, redis_url), [CUSTOMER])).leftovers
    await client.delete("forgotten")

    assert left.open_requests == ("req_0", "req_1")
    assert {key for key, length in left.lengths.items() if length == 1} == lists | {"leases"}
    assert left.leaked_keys == ("forgotten",)


async def test_the_log_of_runs(database_url: str, redis_url: str, tmp_path: Path) -> None:
    """Incomplete last lines and warm-up runs are skipped."""
    lines = [
        json.dumps({"nonce": "a", "sent": 1.0, "began": 1.5}),
        json.dumps({"nonce": "", "sent": None, "began": 2.0}),
    ]
    (tmp_path / "1-1.jsonl").write_text("\n".join(lines) + '\n{"nonce": "b", "se')
    (tmp_path / "2-1.jsonl").write_text(lines[0] + "\n")
    runs = (await collect(sources(database_url, redis_url, tmp_path), [CUSTOMER])).runs

    assert runs is not None
    assert [(run.nonce, run.began, run.process) for run in runs] == [("a", 1.5, "1-1"), ("a", 1.5, "2-1")]


async def test_unreachable_servers_are_errors() -> None:
    """Each is one error, so that missing evidence proves nothing."""
    unreachable = sources("postgresql+asyncpg://nobody@127.0.0.1:1/none", "redis://127.0.0.1:1/0")
    found = await collect(unreachable, [CUSTOMER], unfinished="Not drained: 3 open rows.")

    assert len(found.errors) == 3


def test_open_files_are_compared(tmp_path: Path) -> None:
    """Only a process that was there before and after is compared."""
    process = psutil.Process()
    before = open_files([("me", process)])
    with (tmp_path / "one").open("w"), (tmp_path / "two").open("w"):
        counts = compared({**before, ("gone", 1, 0.0): 5}, open_files([("me", process)]))
    assert [(one.process, one.after - one.before) for one in counts] == [(f"me ({process.pid})", 2)]
