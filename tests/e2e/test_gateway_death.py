"""A gateway dies by SIGKILL with work in hand: its clients repeat with their Idempotency-Key at another one.

What it had queued is dropped before the GPU and closed in the audit; what it had running is finished and replayed.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from admin import sql
from eventually import eventually
from faults import busy_worker
from scheduler.protocol.batches import GATEWAY_GONE_MS
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from second_gateway import second_gateway
from stack import Stack, start_stack

TIERS = ("enterprise", "paid", "free")


@pytest.fixture(scope="module")
def slow_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker of 250 ms a batch of four, and one gateway, which stays."""
    options = ("--backend", "simulated:250", "--workers", "1", "--max-batch-size", "4")
    with start_stack(tmp_path_factory.mktemp("slow"), *options) as stack:
        yield stack


async def ask(stack: Stack, url: str, tier: str, key: str) -> tuple[int, dict[str, Any], bool]:
    """Status, document, and whether it is a replay; status 0 where the connection broke."""
    headers = stack.headers(tier) | {"Idempotency-Key": key}
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/inference", json={"input": key}, headers=headers) as answer,
        ):
            return answer.status, await answer.json(), answer.headers.get("Idempotent-Replayed") == "true"
    except aiohttp.ClientError:
        return 0, {}, False


async def insist(stack: Stack, tier: str, key: str) -> tuple[dict[str, Any], bool, set[str]]:
    """A client that repeats at the gateway that stays until it has its answer; also what it was told meanwhile."""
    told: set[str] = set()

    async def answered() -> tuple[dict[str, Any], bool]:
        status, document, replayed = await ask(stack, stack.url, tier, key)
        if status != 200:
            told.add(document["error"]["code"])
            await asyncio.sleep(document["error"].get("retry_after_ms", 0) / 1000)
        return (document, replayed) if status == 200 else ()  # type: ignore[return-value]

    document, replayed = await eventually(answered, f"{key} is answered", 25.0)
    return document, replayed, told


async def test_what_it_had_queued_is_dropped_and_run_once_elsewhere(slow_stack: Stack, tmp_path: Path) -> None:
    """Nine wait when it dies: no GPU sees them, nine rows say so, and nine repetitions are nine completed runs."""
    stack = slow_stack
    await sql(stack, "UPDATE tiers SET max_queue_ms = 10000")  # what ends them must be their gateway's death
    pid = stack.pids("worker")["worker-1"]
    keys = {f"queued-{n}": TIERS[n % 3] for n in range(9)}
    client = command_client(stack.redis_url)
    async with second_gateway(stack, tmp_path) as (process, url):
        await stack.healthy(1)
        os.kill(pid, signal.SIGSTOP)
        try:
            asking = [asyncio.create_task(ask(stack, url, tier, key)) for key, tier in keys.items()]
            await eventually(lambda: _held(client), "all nine are accepted")
            counts_from = time.monotonic() + GATEWAY_GONE_MS / 1000  # A younger request shows that its gateway lived.
            (gateway,) = {r["gateway_id"] for r in await eventually(lambda: _open(stack), "nine rows")}
            process.kill()
            assert [status for status, _, _ in await asyncio.gather(*asking)] == [0] * 9

            async def gone() -> bool:
                return not await client.exists(Keys().gateway(gateway)) and time.monotonic() > counts_from

            await eventually(gone, "it counts as dead", 4.0)
        finally:
            os.kill(pid, signal.SIGCONT)
            await client.aclose()
    answers = await asyncio.gather(*(insist(stack, tier, key) for key, tier in keys.items()))

    assert sorted(document["output"] for document, _, _ in answers) == sorted(key[::-1] for key in keys)
    assert not any(replayed for _, replayed, _ in answers)
    ran = await stack.audited([str(document["request_id"]) for document, _, _ in answers])
    assert {(row["status"], row["attempts"]) for row in ran.values()} == {("completed", 1)}
    lost = await eventually(lambda: _closed(stack, gateway), "its rows are closed", 5.0)
    assert [(row["error_code"], row["attempts"], row["gpu_ms"]) for row in lost] == [("gateway_lost", 0, None)] * 9


async def _held(client: Any) -> bool:
    keys = [key async for key in client.scan_iter("request:*")]
    states = [await client.hget(key, "state") for key in keys]
    return sum(state in {b"queued", b"processing"} for state in states) == 9


async def _open(stack: Stack) -> list[asyncpg.Record]:
    rows = await sql(stack, "SELECT gateway_id FROM requests WHERE status IN ('queued', 'processing')")
    return rows if len(rows) == 9 else []


async def _closed(stack: Stack, gateway: str) -> list[asyncpg.Record]:
    query = "SELECT error_code, attempts, gpu_ms FROM requests WHERE gateway_id = $1 AND status = 'failed'"
    rows = await sql(stack, query, gateway)
    return rows if len(rows) == 9 else []


async def test_what_it_had_running_is_replayed_and_not_run_twice(slow_stack: Stack, tmp_path: Path) -> None:
    """On the GPU when it dies: the run is finished, and the repetition at the other gateway gets its answer."""
    stack, key = slow_stack, "running-1"
    client = command_client(stack.redis_url)
    before = {row["id"] for row in await sql(stack, "SELECT id FROM requests")}
    async with second_gateway(stack, tmp_path) as (process, url):
        await stack.healthy(1)
        asking = asyncio.create_task(ask(stack, url, "enterprise", key))
        await eventually(lambda: busy_worker(client), "it runs")
        process.kill()
        assert (await asking)[0] == 0
    await client.aclose()
    document, replayed, told = await insist(stack, "enterprise", key)

    assert (document["output"], replayed) == (key[::-1], True)
    assert told <= {"idempotency_in_progress"}
    row = (await stack.audited([document["request_id"]]))[document["request_id"]]
    assert (row["status"], row["attempts"]) == ("completed", 1)
    assert {row["id"] for row in await sql(stack, "SELECT id FROM requests")} - before == {document["request_id"]}
