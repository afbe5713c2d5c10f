"""A stack for one case: started empty, loaded, read, stopped."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg

from ledger.postgres import asyncpg_dsn, closing
from tierlane_local.running import running_up
from tierlane_local.stack_file import StackInfo, read_stack
from tierlane_tools.bench.measurement.resources import ProcessCpu, cpu_between, read_cpu

START_S = 300.0
STOP_S = 60.0
SETTLE_S = 3.0
"""The time in which gateways apply changed rows and the start of the stack ends."""
HTTP_TIMEOUT_S = 5.0

# All limits are raised, but still checked for every request.
RAISED = """
UPDATE tiers SET requests_per_second = 1e6, burst = 1e6, max_concurrency = 100000, tokens_per_minute = 1e12,
                 max_queue_depth = 1000000, shed_depth = NULL, shed_wait_ms = NULL
"""
# Customers are not held by their own limits, so that only the shares and the shedding of tiers apply.
CUSTOMERS_RAISED = """
UPDATE customers SET requests_per_second = 1e6, burst = 1e6, max_concurrency = 100000, tokens_per_minute = 1e12
"""
CUSTOMERS_AS_TIERS = """
UPDATE customers SET requests_per_second = NULL, burst = NULL, max_concurrency = NULL, tokens_per_minute = NULL
"""
# Without the limit of the capacity either: it is checked and counted, but not enforced.
SHADOW = "UPDATE tiers SET shadow = true"


class Stack:
    """A running stack."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.file = home / "data" / "stack.json"

    @property
    def info(self) -> StackInfo:
        """The content of the stack file now."""
        return read_stack(self.file)

    @property
    def redis_url(self) -> str:
        """The URL of its Redis."""
        return self.info.redis_url

    def sql(self, *statements: str) -> None:
        """Run statements, and wait until they are applied."""
        asyncio.run(self._all(statements))
        time.sleep(SETTLE_S)

    def value(self, query: str) -> Any:
        """The one value of a query."""
        return asyncio.run(self._all([query]))

    async def _all(self, statements: Sequence[str]) -> Any:
        async with closing(await asyncpg.connect(asyncpg_dsn(self.info.database_url), timeout=10)) as connection:
            found = None
            for statement in statements:
                found = await connection.fetchval(statement)
            return found

    def raise_limits(self, *more: str) -> None:
        """Raise all limits, which are still checked."""
        self.sql(RAISED, CUSTOMERS_AS_TIERS, *more)

    def bench(self, **options: object) -> dict[str, Any]:
        """Run `tierlane bench` with these options; returns its document. Several may run at once."""
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
        return read_cpu(self.info.processes)

    def operator_get(self, path: str) -> dict[str, Any]:
        """The JSON document of an internal endpoint. Raises OSError and ValueError."""
        _, body = self._request("GET", path, self.info.service_token)
        return dict(json.loads(body))

    def status_of(self, key: str) -> int:
        """The status of an invalid request with an API key: 401 where the gateway does not know the key."""
        return self._request("POST", "/v1/inference", key, b"{")[0]

    def _request(self, method: str, path: str, token: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = HTTPConnection(self.info.http_url.removeprefix("http://"), timeout=HTTP_TIMEOUT_S)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def used_us(before: list[ProcessCpu], after: list[ProcessCpu], requests: int) -> dict[str, float]:
    """CPU between two readings by role, in microseconds a request."""
    used = cpu_between(before, after)
    return {role: round(seconds * 1e6 / max(1, requests), 2) for role, seconds in used.by_role.items()}


@contextmanager
def started(
    *,
    workers: int,
    batch: int = 64,
    gateways: int = 2,
    schedulers: int = 1,
    backend: str = "simulated:50",
    durable: bool = False,
    **settings: object,
) -> Iterator[Stack]:
    """Run a stack on a free port. `durable`: Redis and PostgreSQL write to the disk, as by default.

    `settings`: values of settings by name.
    """
    with tempfile.TemporaryDirectory(prefix="tierlane-suite-") as name:
        home = Path(name)
        options: list[object] = [] if durable else ["--ephemeral"]
        options += ["--port", 0, "--gateways", gateways, "--schedulers", schedulers, "--workers", workers]
        options += ["--backend", backend, "--max-batch-size", batch]
        environment = os.environ | {f"TIERLANE_{name.upper()}": str(value) for name, value in settings.items()}
        with running_up(home, *options, environment=environment, start_s=START_S, stop_s=STOP_S):
            time.sleep(SETTLE_S)
            yield Stack(home)
