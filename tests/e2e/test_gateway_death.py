"""A gateway is killed with open requests: its clients retry with their Idempotency-Key at another gateway."""

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
PATIENT = {"TIERLANE_TOTAL_REQUEST_MS": "15000"}
"""Requests outlast their gateway by far, also on a slow machine: the death of the gateway ends them, not their deadline."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker of 250 ms a batch of four, and the gateway that lives."""
    options = ("--backend", "simulated:250", "--workers", "1", "--max-batch-size", "4")
    with start_stack(tmp_path_factory.mktemp("slow"), *options, environment=PATIENT) as running:
        yield running


async def send(stack: Stack, url: str, tier: str, key: str) -> tuple[int, dict[str, Any], bool]:
    """Status, document, and whether it is a replay; status 0 if the connection broke."""
    headers = stack.headers(tier) | {"Idempotency-Key": key}
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/inference", json={"input": key}, headers=headers) as response,
        ):
            return response.status, await response.json(), response.headers.get("Idempotent-Replayed") == "true"
    except aiohttp.ClientError:
        return 0, {}, False


async def retry(stack: Stack, tier: str, key: str) -> tuple[dict[str, Any], bool, set[str]]:
    """Retry at the living gateway until the request is completed; also the codes of the rejections."""
    codes: set[str] = set()

    async def completed() -> tuple[dict[str, Any], bool]:
        status, document, replayed = await send(stack, stack.url, tier, key)
        if status != 200:
            codes.add(document["error"]["code"])
            await asyncio.sleep(document["error"].get("retry_after_ms", 0) / 1000)
        return (document, replayed) if status == 200 else ()  # type: ignore[return-value]

    document, replayed = await eventually(completed, f"{key} is completed", 25.0)
    return document, replayed, codes


async def rows(stack: Stack, query: str, *values: object) -> list[asyncpg.Record]:
    """The rows of the query, once there are nine."""
    found = await sql(stack, query, *values)
    return found if len(found) == 9 else []


async def has_heartbeat(stack: Stack, gateway: str) -> bool:
    """Whether any cell has a heartbeat of the gateway."""
    for url in stack.cells.values():
        client = command_client(url)
        exists = await client.exists(Keys.at(url).gateway(gateway))
        await client.aclose()
        if exists:
            return True
    return False


async def test_its_queued_requests_do_not_run_and_the_retries_run_once(stack: Stack, tmp_path: Path) -> None:
    """Nine queued requests end with gateway_lost before a GPU; their nine retries are completed in one run each."""
    await sql(stack, "UPDATE tiers SET max_queue_ms = 15000")
    pid = stack.pids("worker")["worker-1"]
    keys = {f"queued-{n}": TIERS[n % 3] for n in range(9)}
    queued = "SELECT gateway_id FROM requests WHERE status IN ('queued', 'processing')"
    async with second_gateway(stack, tmp_path, PATIENT) as (process, url):
        await stack.healthy(1)
        os.kill(pid, signal.SIGSTOP)
        try:
            tasks = [asyncio.create_task(send(stack, url, tier, key)) for key, tier in keys.items()]
            (gateway,) = {row["gateway_id"] for row in await eventually(lambda: rows(stack, queued), "nine rows")}
            dead_from = time.monotonic() + GATEWAY_GONE_MS / 1000  # A younger request shows that its gateway lived.
            process.kill()
            assert [status for status, _, _ in await asyncio.gather(*tasks)] == [0] * 9

            async def gone() -> bool:
                return time.monotonic() > dead_from and not await has_heartbeat(stack, gateway)

            await eventually(gone, "the gateway counts as dead", 4.0)
        finally:
            os.kill(pid, signal.SIGCONT)
    answers = await asyncio.gather(*(retry(stack, tier, key) for key, tier in keys.items()))

    assert sorted(document["output"] for document, _, _ in answers) == sorted(key[::-1] for key in keys)
    assert not any(replayed for _, replayed, _ in answers)
    ran = await stack.audited([str(document["request_id"]) for document, _, _ in answers])
    assert {(row["status"], row["attempts"]) for row in ran.values()} == {("completed", 1)}
    failed = "SELECT error_code, attempts, gpu_ms FROM requests WHERE gateway_id = $1 AND status = 'failed'"
    lost = await eventually(lambda: rows(stack, failed, gateway), "their rows are closed", 5.0)
    assert [(row["attempts"], row["gpu_ms"]) for row in lost] == [(0, None)] * 9
    assert {row["error_code"] for row in lost} == {"gateway_lost"}


async def test_its_running_request_is_replayed_and_does_not_run_twice(stack: Stack, tmp_path: Path) -> None:
    """The run is finished, and the retry at the other gateway gets its response."""
    key, urls = "running-1", stack.cells.values()
    before = {row["id"] for row in await sql(stack, "SELECT id FROM requests")}
    async with second_gateway(stack, tmp_path, PATIENT) as (process, url):
        await stack.healthy(1)
        task = asyncio.create_task(send(stack, url, "enterprise", key))
        await eventually(lambda: busy_worker(urls), "the run")
        process.kill()
        assert (await task)[0] == 0
    document, replayed, codes = await retry(stack, "enterprise", key)

    assert (document["output"], replayed) == (key[::-1], True)
    assert codes <= {"idempotency_in_progress"}
    row = (await stack.audited([document["request_id"]]))[document["request_id"]]
    assert (row["status"], row["attempts"]) == ("completed", 1)
    assert {row["id"] for row in await sql(stack, "SELECT id FROM requests")} - before == {document["request_id"]}
