"""A stack for one case: started from nothing, loaded, asked, stopped. Every case has its own, so none sees another's past."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import psutil

from ledger.postgres import asyncpg_dsn
from tierlane.bench.resources import CpuUse, ProcessCpu, StackInfo, cpu_between, read_cpu, read_stack, rss_by_role

START_S = 300.0
STOP_S = 60.0
SETTLE_S = 3.0
"""For gateways to obey changed rows, and for what starting cost to be over."""

# All limits raised, yet every one of them is looked at for every request.
RAISED = """
UPDATE tiers SET requests_per_second = 1e6, burst = 1e6, max_concurrency = 100000, tokens_per_minute = 1e12,
                 max_queue_depth = 1000000, shed_depth = NULL, shed_wait_ms = NULL
"""
# Customers that their own limits do not hold, so that the shares and the shedding of tiers are what speaks.
CUSTOMERS_RAISED = """
UPDATE customers SET requests_per_second = 1e6, burst = 1e6, max_concurrency = 100000, tokens_per_minute = 1e12
"""
CUSTOMERS_AS_TIERS = """
UPDATE customers SET requests_per_second = NULL, burst = NULL, max_concurrency = NULL, tokens_per_minute = NULL
"""
# Also without the limit that the capacity itself sets: judged and counted, but not enforced.
SHADOW = "UPDATE tiers SET shadow = true"


class Stand:
    """A running stack."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.file = home / "data" / "stack.json"

    @property
    def stack(self) -> StackInfo:
        """What the stack file says now."""
        return read_stack(self.file)

    @property
    def redis_url(self) -> str:
        """Its Redis."""
        return str(json.loads(self.file.read_text())["redis_url"])

    def sql(self, *statements: str) -> None:
        """Run statements."""
        asyncio.run(self._all(statements))
        time.sleep(SETTLE_S)

    def value(self, query: str) -> Any:
        """The one value of a query."""
        return asyncio.run(self._all([query]))

    async def _all(self, statements: tuple[str, ...] | list[str]) -> Any:
        connection = await asyncpg.connect(asyncpg_dsn(self.stack.database_url), timeout=10)
        try:
            found = None
            for statement in statements:
                found = await connection.fetchval(statement)
            return found
        finally:
            await connection.close()

    def raise_limits(self, *more: str) -> None:
        """All limits raised but checked."""
        self.sql(RAISED, CUSTOMERS_AS_TIERS, *more)

    def bench(self, **options: object) -> dict[str, Any]:
        """`tierlane bench` with these options; its document. Two may run at once."""
        out = self._home / f"bench-{uuid4().hex}.json"
        flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "tierlane", "bench", "--stack", str(self.file), "--json", str(out), *flags]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode not in (0, 1):
            raise RuntimeError(f"tierlane bench: {ended.stderr.strip()[-500:]}")
        document: dict[str, Any] = json.loads(out.read_text())
        return document

    def reading(self) -> list[ProcessCpu]:
        """CPU and memory of every process now."""
        return read_cpu(self.stack.processes)


def used_us(before: list[ProcessCpu], after: list[ProcessCpu], requests: int) -> dict[str, float]:
    """CPU between two readings by role, in microseconds a request."""
    used: CpuUse = cpu_between(before, after)
    return {role: round(seconds * 1e6 / max(1, requests), 2) for role, seconds in used.by_role.items()}


def rss_growth(before: list[ProcessCpu], after: list[ProcessCpu]) -> dict[str, float]:
    """By which share the memory of each role grew."""
    early, late = rss_by_role(before), rss_by_role(after)
    return {role: round(late[role] / early[role] - 1, 4) for role in early if role in late and early[role]}


@contextmanager
def started(
    *,
    workers: int,
    batch: int = 64,
    gateways: int = 2,
    backend: str = "simulated:50",
    durable: bool = False,
    **settings: object,
) -> Iterator[Stand]:
    """A stack of its own on a free port. `durable`: Redis and PostgreSQL write to the disk, as they do by default.

    `settings`: others than the defaults, by their names.
    """
    with tempfile.TemporaryDirectory(prefix="tierlane-suite-") as name:
        home = Path(name)
        stand = Stand(home)
        log = home / "up.log"
        command = [sys.executable, "-m", "tierlane", "up", "--data-dir", str(home / "data")]
        command += [] if durable else ["--ephemeral"]
        command += ["--port", "0", "--gateways", str(gateways), "--schedulers", "1", "--workers", str(workers)]
        command += ["--backend", backend, "--max-batch-size", str(batch)]
        environment = os.environ | {f"TIERLANE_{name.upper()}": str(value) for name, value in settings.items()}
        with log.open("wb") as sink:
            up = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
        try:
            _wait_for(stand.file, up, log)
            time.sleep(SETTLE_S)
            yield stand
        finally:
            up.send_signal(signal.SIGINT)
            try:
                up.wait(STOP_S)
            except subprocess.TimeoutExpired:
                up.kill()
                up.wait()


def _wait_for(file: Path, up: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not file.exists():
        if up.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"The stack does not start: {_said(log)[-1500:]}")
        time.sleep(0.1)


def _said(log: Path) -> str:
    """The sentences of a log: what is not JSON, which is of roles that were well."""
    return "\n".join(line for line in log.read_text("utf-8").splitlines() if "| {" not in line)


def free_memory() -> int:
    """Bytes that new processes may have."""
    return int(psutil.virtual_memory().available)
