"""A batch of 50,000 lines through OpenAI's client, beside interactive requests at half of the capacity, while processes of every
role are killed and Redis is emptied in turn. TIERLANE_TEST_BATCH_LINES sets another number of lines.
"""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import asyncpg
import openai
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from eventually import eventually
from ledger.postgres import asyncpg_dsn
from load import load, verdict
from stack import Stack, start_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

LINES = int(os.environ.get("TIERLANE_TEST_BATCH_LINES", "50000"))
WORKERS, BATCH, BATCH_MS = 8, 4, 100
CAPACITY_RPS = WORKERS * BATCH * 1000 / BATCH_MS
GPUS = (
    *("--backend", f"simulated:{BATCH_MS}", "--workers", str(WORKERS), "--max-batch-size", str(BATCH)),
    *("--gateways", "2", "--schedulers", "2"),
)
ROLES = ("gateway", "flushall", "scheduler", "worker", "postgres", "redis", "model")
BETWEEN_S = 7.0
AFTER_S = 5.0  # After each fault, for which the busy share is printed.
CALL = {"max_retries": 20, "timeout": 60.0}


@pytest.fixture
def batch_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways, two schedulers, eight simulated GPUs."""
    with start_stack(tmp_path_factory.mktemp("batches"), *GPUS) as stack:
        yield stack


def input_lines() -> bytes:
    """An input file; every thousandth line has a body that is rejected."""
    lines = []
    for number in range(LINES):
        body: dict[str, Any] = {"model": "simulated", "prompt": f"line {number}"}
        if number % 1000 == 999:
            body["colour"] = "red"
        lines.append(
            json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body})
        )
    return "\n".join(lines).encode()


async def query(stack: Stack, sql: str, *arguments: Any) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(asyncpg_dsn(stack.info.database_url))
    try:
        return await connection.fetch(sql, *arguments)
    finally:
        await connection.close()


async def fault(stack: Stack, role: str, turn: int) -> str:
    """Kill a process of a role, or empty Redis; returns its name."""
    if role == "flushall":
        redis = Redis.from_url(stack.redis_url)
        await redis.flushall()
        await redis.aclose()
        return role
    pids = await eventually(lambda: stack.pids(role), f"there is a {role}", 30.0)
    name = sorted(pids)[turn % len(pids)]
    os.kill(pids[name], signal.SIGKILL)
    return name


async def faults(stack: Stack, done: asyncio.Event) -> list[tuple[float, str, str]]:
    """Cause one fault after the other until the batch has ended. Returns their times, roles and names."""
    caused: list[tuple[float, str, str]] = []
    while not done.is_set():
        for role in ROLES:
            await asyncio.sleep(BETWEEN_S)
            if done.is_set():
                break
            caused.append((time.time(), role, await fault(stack, role, len(caused))))
    return caused


async def busy_after(stack: Stack, caused: list[tuple[float, str, str]]) -> dict[str, list[str]]:
    """The share of all GPUs that runs used in the seconds after each fault, by role; of runs that ended."""
    rows = await query(
        stack,
        "SELECT extract(epoch FROM max(completed_at))::float8 AS ended, max(gpu_ms) / 1000 AS s FROM requests "
        "WHERE gpu_ms > 0 GROUP BY batch_id",
    )
    shares: dict[str, list[str]] = {}
    for at, role, _ in caused:
        spans = (min(row["ended"], at + AFTER_S) - max(row["ended"] - row["s"], at) for row in rows)
        shares.setdefault(role, []).append(f"{sum(max(0.0, span) for span in spans) / WORKERS / AFTER_S:.0%}")
    return shares


async def memory_of_redis(stack: Stack, done: asyncio.Event) -> list[int]:
    """Used memory in bytes, twice a second."""
    seen: list[int] = []
    while not done.is_set():
        redis = Redis.from_url(stack.redis_url, socket_timeout=1.0)
        try:
            seen.append(int((await redis.info("memory"))["used_memory"]))
        except RedisError:  # It may be restarting.
            pass
        finally:
            await redis.aclose()
        await asyncio.sleep(0.5)
    return seen


async def content(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def audit_of(stack: Stack, ids: list[str]) -> tuple[int, int]:
    """Once no audit row is open: the number of completed ones, and how many of these ids have none."""

    async def counted() -> dict[str, int]:
        rows = await query(stack, "SELECT status, count(*) AS n FROM requests GROUP BY status")
        counts = {row["status"]: row["n"] for row in rows}
        return {} if {"queued", "processing"} & set(counts) else counts

    counts = await eventually(counted, "no open audit row", 120.0)
    missing = await query(
        stack,
        "SELECT count(*) AS n FROM unnest($1::text[]) AS u (id) WHERE NOT EXISTS (SELECT FROM requests AS r WHERE r.id = u.id)",
        ids,
    )
    return counts.get("completed", 0), missing[0]["n"]


async def test_every_line_ends_once(batch_stack: Stack) -> None:
    """Every custom_id is once in the output or the error file, with its own output, and has a closed audit row."""
    await query(batch_stack, "UPDATE tiers SET shadow = true")
    model = (await query(batch_stack, "SELECT name FROM models LIMIT 1"))[0]["name"]
    raw = input_lines().replace(b'"simulated"', json.dumps(model).encode())
    done = asyncio.Event()
    async with openai.AsyncOpenAI(
        api_key=batch_stack.key("enterprise"), base_url=f"{batch_stack.url}/v1", **CALL
    ) as client:
        began = time.monotonic()
        file = await client.files.create(file=("lines.jsonl", raw), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        uploaded_s = time.monotonic() - began
        causing = asyncio.create_task(faults(batch_stack, done))
        measuring = asyncio.create_task(memory_of_redis(batch_stack, done))
        sending = asyncio.create_task(
            load(batch_stack, CAPACITY_RPS / 2, 1.0, ("enterprise", "paid"), done=done.is_set), name="interactive"
        )

        async def ended() -> Any:
            await asyncio.sleep(0.5)
            found = await client.batches.retrieve(batch.id)
            return found if found.status in ("completed", "failed", "expired", "cancelled") else None

        last = await eventually(ended, "the batch has ended", 1000.0)
        ended_s = time.monotonic() - began
        done.set()
        caused, memory, answers = await causing, await measuring, await sending
        outputs, errors = await content(client, last.output_file_id), await content(client, last.error_file_id)

    print(f"{len(raw):,} bytes uploaded in {uploaded_s:.1f} s; {LINES:,} lines ended after {ended_s:.1f} s,")
    print(f"{LINES / (ended_s - uploaded_s):.0f} lines/s; faults: {[name for _, _, name in caused]}")
    print(f"interactive requests: {verdict(answers)}")
    print(f"Redis memory: {min(memory):,} to {max(memory):,} bytes; counts {last.request_counts}")
    seen = Counter(each["custom_id"] for each in (*outputs, *errors))
    wrong = [
        each
        for each in outputs
        if each["response"]["body"]["choices"][0]["text"][::-1] != f"line {each['custom_id'].removeprefix('id-')}"
    ]
    ids = [each["response"]["request_id"] for each in outputs]
    audited, missing = await audit_of(batch_stack, ids)
    busy = await query(batch_stack, "SELECT sum(gpu_ms / batch_size) / 1000 AS s FROM requests WHERE gpu_ms > 0")
    print(f"GPUs busy with completed requests: {busy[0]['s'] / WORKERS / (ended_s - uploaded_s):.0%}")
    print(f"in the {AFTER_S:.0f} s after each fault: {await busy_after(batch_stack, caused)}")
    print(f"audit: {audited:,} completed, {missing} of {len(ids):,} output lines without a row")

    assert last.status == "completed"
    assert [custom_id for custom_id, count in seen.items() if count > 1] == []
    assert len(seen) == LINES
    assert len(errors) == LINES // 1000
    assert wrong == []
    assert missing == 0
