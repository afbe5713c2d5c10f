"""A stack with as many customers as are wanted, loaded with requests whose CPU time is counted; what limits_at_scale stands on."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import asyncpg
import psutil

from ledger.catalog.api_key import checksum
from ledger.postgres import asyncpg_dsn
from tierlane.bench.http_client import BenchResponse, ConnectionPool, Pending
from tierlane.bench.load import error_code
from tierlane.bench.plan import TargetAddress, read_address
from tierlane.bench.resources import StackInfo, cpu_between, read_cpu, read_stack
from tierlane.bench.statistics import TierStatistics, UnansweredCause

STACK = (
    "--gateways",
    "1",
    "--schedulers",
    "1",
    "--backend",
    "simulated:50",
    "--workers",
    "2",
    "--max-batch-size",
    "64",
)
ROLES = ("gateway", "redis")
CONNECTIONS = 64
TIMEOUT_S = 10.0
START_S = 120.0
LOAD_S = 60.0  # In which all customers must be known.
TICK_S = 0.001

# Keys of known text: the id and the secret are the number, so that a hundred thousand need not be handed over.
ADD = """
WITH new AS (
    INSERT INTO customers (name, tier, requests_per_second, burst, max_concurrency, tokens_per_minute)
    SELECT 'scale-' || n, (ARRAY['enterprise', 'paid', 'free'])[n % 3 + 1], 100000, 100000, 10000, 1000000000000
    FROM generate_series(1, $1::integer) AS n
    RETURNING id, substr(name, 7)::integer AS n
)
INSERT INTO api_keys (id, customer_id, name, secret_hash)
SELECT 's' || lpad(n::text, 11, '0'), id, 'scale', sha256(convert_to('S' || lpad(n::text, 27, '0'), 'UTF8')) FROM new
"""
REVOKE = "UPDATE api_keys SET revoked_at = now() WHERE id = $1"


def key_id(number: int) -> str:
    """The public part of a customer's key."""
    return f"s{number:011d}"


def key_text(number: int) -> str:
    """The key of a customer, as the SQL above makes it."""
    body = f"tl_{key_id(number)}_S{number:027d}"
    return body + checksum(body)


class Round(NamedTuple):
    """What one stretch of load cost: CPU microseconds per answered request by role, and what was not a 200."""

    microseconds: dict[str, float]
    answered: int
    refused: Counter[str]

    @property
    def total(self) -> float:
        return sum(self.microseconds.values())


class Subject:
    """One stack and its customers."""

    def __init__(self, name: str, customers: int, file: Path) -> None:
        self.name = name
        self.customers = customers
        self._file = file

    @property
    def stack(self) -> StackInfo:
        """What the stack file says now."""
        return read_stack(self._file)

    def gateway(self) -> psutil.Process:
        """Its one gateway."""
        return psutil.Process(next(process.pid for process in self.stack.processes if process.role == "gateway"))

    async def sql(self, query: str, *values: object) -> None:
        """Run one statement."""
        connection = await asyncpg.connect(asyncpg_dsn(self.stack.database_url), timeout=10)
        try:
            await connection.execute(query, *values)
        finally:
            await connection.close()

    async def fill(self) -> float:
        """Add the customers; seconds until the last one's key is known."""
        await self.sql(ADD, self.customers)
        return await self._until(key_text(self.customers), {415}, LOAD_S)

    async def revoked(self, number: int) -> float:
        """Revoke a key; seconds from the commit until it is refused."""
        await self.sql(REVOKE, key_id(number))
        return await self._until(key_text(number), {401}, 10.0)

    async def _until(self, key: str, wanted: set[int], within_s: float) -> float:
        """Ask with what is no JSON, which is refused (415) after the key was looked at, until this is the answer."""
        began = time.monotonic()
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            while True:
                async with session.post(f"{self.stack.http_url}/v1/inference", data=b"{") as answer:
                    took_s = time.monotonic() - began
                    if answer.status in wanted:
                        return took_s
                if took_s > within_s:
                    raise SystemExit(f"{self.name}: {answer.status} after {took_s:.0f} s, expected {sorted(wanted)}.")
                await asyncio.sleep(0.2 if answer.status == 401 else 0.01)

    async def loaded(self, rate: float, seconds: float, active: int) -> Round:
        """Load from the first `active` customers in turn."""
        load = _Load(read_address(self.stack.http_url), [key_text(n + 1) for n in range(active)])
        before = await asyncio.to_thread(read_cpu, self.stack.processes)
        await load.run(rate, seconds)
        used = cpu_between(before, await asyncio.to_thread(read_cpu, self.stack.processes))
        answered = sum(load.answers.values())
        per_request = {role: used.by_role.get(role, 0.0) * 1e6 / max(1, answered) for role in ROLES}
        return Round(per_request, answered, load.refused())


class _Load:
    """Requests at equal gaps over keys in turn, on the connections of `tierlane bench`."""

    def __init__(self, address: TargetAddress, keys: Sequence[str]) -> None:
        body = b'{"input":"how much does one of many cost"}'
        head = f"POST {address.path} HTTP/1.1\r\nHost: {address.authority}\r\nContent-Type: application/json\r\n"
        rest = f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._head, self._rest = head.encode() + b"Authorization: Bearer ", b"\r\n" + rest
        self._keys = [key.encode() for key in keys]
        self._counters = TierStatistics("all")
        self._sent = self._settled = 0
        self.answers: Counter[str] = Counter()
        self._pool = ConnectionPool(
            address.host,
            address.port,
            cap=CONNECTIONS,
            timeout_s=TIMEOUT_S,
            encode=self._encode,
            on_answer=self._answered,
            on_silence=self._silent,
        )

    def refused(self) -> Counter[str]:
        """Everything but 200s."""
        return Counter({what: count for what, count in self.answers.items() if what != "200"})

    async def run(self, rate: float, seconds: float) -> None:
        began, wanted = time.monotonic(), int(rate * seconds)
        while self._settled < wanted:
            now_s = time.monotonic() - began
            while self._sent < min(wanted, now_s * rate):
                self._pool.submit(Pending(now_s, 0, b"%d" % self._sent, self._counters))
                self._sent += 1
            self._pool.expire(now_s)
            await asyncio.sleep(TICK_S)
        await self._pool.close()

    def _encode(self, pending: Pending) -> bytes:
        return self._head + self._keys[int(pending.nonce) % len(self._keys)] + self._rest

    def _answered(self, _: Pending, response: BenchResponse) -> None:
        status = response.status
        self.answers["200" if status == 200 else f"{status} {error_code(response.body)}"] += 1
        self._settled += 1

    def _silent(self, _: Pending, why: UnansweredCause, __: str) -> None:
        self.answers[why] += 1
        self._settled += 1


@contextmanager
def started(name: str, customers: int) -> Iterator[Subject]:
    """A stack of simulated GPUs, stopped at the end."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "tierlane", "up", "--ephemeral", "--data-dir", f"{home}/data", *STACK]
        with (Path(home) / "up.log").open("wb") as log:
            up = subprocess.Popen([*command, "--port", "0"], stdout=log, stderr=log)
        try:
            _wait_for(Path(home) / "data" / "stack.json", up, Path(home) / "up.log")
            yield Subject(name, customers, Path(home) / "data" / "stack.json")
        finally:
            up.send_signal(signal.SIGINT)
            up.wait()


def _wait_for(file: Path, up: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not file.exists():
        if up.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"The stack does not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
