"""Tierlane as it is compared: everything on, all limits raised but checked, a key of each tier, one audit row each."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
from answers import JobError, wait_for
from running import Job, StartError, processes
from wrk import Target

from ledger.postgres import asyncpg_dsn
from tierlane.bench.resources import StackInfo, read_stack

ROOT = Path(__file__).resolve().parents[2]
GATEWAYS = 2
START_S = 120.0
POLL_S = 0.2
CATALOG_S = 2.0
"""Within which raised limits are known everywhere."""

RAISE_TIERS = """
UPDATE tiers SET requests_per_second = 1000000, burst = 1000000, max_concurrency = 100000,
    tokens_per_minute = 1000000000000, max_queue_depth = 1000000, shed_depth = NULL
"""
RAISE_CUSTOMERS = """
UPDATE customers SET requests_per_second = NULL, burst = NULL, max_concurrency = NULL, tokens_per_minute = NULL,
    max_queue_ms = NULL
"""
BATCH_SIZE = "UPDATE models SET max_batch_size = $1"
ENDED = "SELECT count(*) FROM requests WHERE status IN ('completed', 'failed')"
OPEN = "SELECT count(*) FROM requests WHERE status NOT IN ('completed', 'failed')"


class Stack:
    """One that runs."""

    def __init__(self, info: StackInfo) -> None:
        self._info = info
        self.target = Target(f"{info.http_url}/v1/inference", tuple(info.keys.values()))

    async def prepare(self, batch: int) -> None:
        """Raise the limits."""
        connection = await self._connect()
        try:
            await connection.execute(RAISE_TIERS)
            await connection.execute(RAISE_CUSTOMERS)
            await connection.execute(BATCH_SIZE, batch)
        finally:
            await connection.close()
        await asyncio.sleep(CATALOG_S)

    async def audit_rows(self, within_s: float = 60.0) -> int:
        """Rows of requests that came to an end, once all of them have. Raises JobError."""
        connection = await self._connect()
        try:
            async with asyncio.timeout(within_s):
                before = -1
                while (now := await connection.fetchval(ENDED)) != before or await connection.fetchval(OPEN):
                    before = now
                    await asyncio.sleep(1.0)
            return int(now)
        except TimeoutError:
            raise JobError(f"the audit was not complete after {within_s:.0f} s") from None
        finally:
            await connection.close()

    async def _connect(self) -> "asyncpg.Connection[asyncpg.Record]":
        return await asyncpg.connect(asyncpg_dsn(self._info.database_url), timeout=10)


@contextmanager
def running_tierlane(port: int, job: Job) -> Iterator[Stack]:
    """The stack, answering. Raises StartError and JobError."""
    with processes(job.limit_s) as (group, home):
        data = home / "data"
        options = ["--data-dir", str(data), "--port", str(port), "--gateways", str(GATEWAYS)]
        work = ["--schedulers", "1", "--workers", str(job.gpus), "--backend", f"simulated:{job.service_ms}"]
        command = [sys.executable, "-m", "tierlane", "up", "--ephemeral", *options, *work]
        command += ["--max-batch-size", str(job.batch)]
        group.start(command, ROOT, {**os.environ, "PYTHONPATH": str(ROOT)})
        deadline = time.monotonic() + START_S
        while not (data / "stack.json").exists():
            group.still_alive()
            if time.monotonic() > deadline:
                raise StartError(f"not up within {START_S:.0f} s: {group.last_words()}")
            time.sleep(POLL_S)
        stack = Stack(read_stack(data / "stack.json"))
        asyncio.run(stack.prepare(job.batch))
        wait_for(stack.target, START_S, group.still_alive)
        yield stack
