"""A thousand asynchronous jobs while one process of each role after the other is killed: all succeed, each once."""

import asyncio
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import asyncpg
import pytest

from eventually import eventually
from ledger.postgres import asyncpg_dsn
from stack import Stack, start_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

JOBS = 1000
AT_ONCE = 40
# Slow enough that all kills happen before the end: three workers with 8 in 600 ms run at most 40 jobs/s.
SLOW_GPUS = ("--backend", "simulated:600", "--workers", "3", "--max-batch-size", "8", "--gateways", "2")
ROLES = ("gateway", "redis", "worker", "postgres", "model", "scheduler", "gateway", "redis", "postgres")
BETWEEN_S = 2.5
AUDITED_WITHIN_S = 90.0


@pytest.fixture
def slow_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways and three slow workers."""
    with start_stack(tmp_path_factory.mktemp("jobs"), *SLOW_GPUS) as stack:
        yield stack


@dataclass
class Customer:
    """Submits jobs until they are accepted, and polls their results; `inputs` and `results` are by task id."""

    session: aiohttp.ClientSession
    url: str
    headers: dict[str, str]
    inputs: dict[str, str] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    responses: Counter[str] = field(default_factory=Counter)

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """The status, 0 without a response, and the body."""
        try:
            async with self.session.request(method, self.url + path, headers=self.headers, **options) as answer:
                status, document = answer.status, await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError):
            status, document = 0, {}
        self.responses[f"{method} {status} {(document.get('error') or {}).get('code', '')}"] += 1
        return status, document

    async def submit(self, number: int) -> None:
        """Submit until the job is accepted; without a response it was not accepted."""
        text = f"{number} {secrets.token_hex(8)}"
        while True:
            status, document = await self.call("POST", "/v1/inference", json={"input": text})
            if status == 202:
                self.inputs[document["task_id"]] = text
                return
            assert status in (0, 429, 503), document
            await asyncio.sleep(0.1)

    async def submit_all(self) -> None:
        """Submit all jobs, `AT_ONCE` at a time."""
        numbers = iter(range(JOBS))

        async def some() -> None:
            for number in numbers:
                await self.submit(number)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    async def poll(self) -> bool:
        """Read the result of every job that has not ended; True when all have."""
        waiting = [task_id for task_id in self.inputs if task_id not in self.results]
        for task_id in waiting:
            status, document = await self.call("GET", f"/v1/result/{task_id}")
            assert status in (0, 200, 503), document
            if document.get("status") in ("SUCCESS", "FAILURE"):
                self.results[task_id] = document
        return len(self.results) == JOBS


@pytest.fixture
async def customer(slow_stack: Stack) -> AsyncIterator[Customer]:
    """A customer of enterprise."""
    headers = slow_stack.headers("enterprise") | {"Prefer": "respond-async"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        yield Customer(session, slow_stack.url, headers)


async def kill_in_turn(stack: Stack) -> list[str]:
    """Kill one process of each role in turn; returns their names."""
    killed = []
    for number, role in enumerate(ROLES):
        turn = ROLES[:number].count(role)  # The second time another process, which leads by then.
        await asyncio.sleep(BETWEEN_S)
        pids = await eventually(lambda role=role: stack.pids(role), f"there is a {role}", 30.0)
        name = sorted(pids)[turn % len(pids)]
        os.kill(pids[name], signal.SIGKILL)
        killed.append(name)
    return killed


async def test_a_thousand_jobs_survive_kills_of_every_role(slow_stack: Stack, customer: Customer) -> None:
    """Every accepted job succeeds with its own output and one audit row, and its result does not change."""
    # Shadow limits reject nothing; otherwise jobs would be accepted only as fast as they run.
    await query(slow_stack, "UPDATE tiers SET shadow = true WHERE name = 'enterprise'")
    began = time.monotonic()
    killing = asyncio.create_task(kill_in_turn(slow_stack))
    await customer.submit_all()
    accepted_s = time.monotonic() - began
    await eventually(customer.poll, "all jobs have ended", 180.0)
    ended_s = time.monotonic() - began
    ended_before_last_kill = not killing.done()
    killed = await killing

    first, customer.results = customer.results, {}
    await eventually(customer.poll, "all results are read again", 30.0)
    rows = await audited(slow_stack, list(customer.inputs))
    jobs = await query(slow_stack, "SELECT status, attempts FROM jobs WHERE id = ANY($1)", list(customer.inputs))
    requeued = sum(row["attempts"] > 0 for row in jobs)
    print(f"killed {killed}; {JOBS} accepted in {accepted_s:.1f} s, ended after {ended_s:.1f} s")
    print(f"the last kill came {'after' if ended_before_last_kill else 'before'} the last end")
    print(f"queued again {requeued}; audit after {time.monotonic() - began:.1f} s; answers {dict(customer.responses)}")

    assert len(customer.inputs) == JOBS
    assert Counter(document["status"] for document in first.values()) == {"SUCCESS": JOBS}
    assert {task_id: document["output"][::-1] for task_id, document in first.items()} == customer.inputs
    assert customer.results == first
    assert Counter(row["status"] for row in rows) == {"completed": JOBS}
    assert len({row["id"] for row in rows}) == JOBS
    assert requeued > 0


async def query(stack: Stack, sql: str, *arguments: Any) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(asyncpg_dsn(stack.info.database_url))
    try:
        return await connection.fetch(sql, *arguments)
    finally:
        await connection.close()


async def audited(stack: Stack, ids: list[str]) -> list[asyncpg.Record]:
    """The audit rows of these jobs, once all are closed."""

    async def closed() -> list[asyncpg.Record]:
        rows = await query(stack, "SELECT id, status, error_code FROM requests WHERE id = ANY($1)", ids)
        final = {row["id"] for row in rows if row["status"] in ("completed", "failed")}
        return rows if len(final) == len(ids) else []

    return await eventually(closed, f"{len(ids)} closed audit rows", AUDITED_WITHIN_S)
