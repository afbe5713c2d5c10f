"""A running stack for tests: its addresses, processes and audit rows."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import asyncpg

from eventually import eventually
from ledger.catalog.snapshot import CellRow
from ledger.postgres import asyncpg_dsn
from scheduler.cells.places import cells_of
from scheduler.redis_client.keys import CLUSTER_SCHEMES, DEFAULT_CELL
from tierlane.connect import STACK_FILE
from tierlane_local.running import bare_environment, running_up
from tierlane_local.stack_file import StackInfo, read_stack
from tierlane_tools.chaos.faults.cluster import ClusterFaults

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0

DRAIN = {"TIERLANE_DRAIN_MS": "1500"}
"""Many tests end with open requests, which are not waited for."""

EVERY_STACK: list[str] = []
"""Options of `tierlane up`, after those of the test (`--stack`), for every stack that starts its own Redis."""


class Stack:
    """The content of `stack.json`, which is read for each access, since processes restart."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir

    @property
    def info(self) -> StackInfo:
        return read_stack(self.data_dir / STACK_FILE)

    @property
    def url(self) -> str:
        return self.info.http_url

    @property
    def redis_url(self) -> str:
        return self.info.redis_url

    @property
    def cells(self) -> dict[str, str]:
        """The Redis URL of each cell that the stack started with, the default one first."""
        return self.info.cells

    def home_url(self, customer_id: str) -> str:
        """The Redis URL of the cell of a customer whose row names none."""
        cells = self.cells
        return cells[cells_of(customer_id, [CellRow(name, None, "open", 1.0) for name in cells])[0]]

    async def primaries(self) -> list[int]:
        """The process of the Redis server that has each cell; in a cluster that of the primary of its slot."""
        names = [await _server_name(cell, url) for cell, url in self.cells.items()]
        running = self.pids("redis")
        return [running[name] for name in dict.fromkeys(names)]

    def key(self, tier: str) -> str:
        return self.info.keys[tier]

    def pids(self, role: str) -> dict[str, int]:
        return {process.name: process.pid for process in self.info.processes if process.role == role}

    def headers(self, tier: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key(tier)}"}

    def role_environment(self) -> dict[str, str]:
        """The environment of a further role beside this stack."""
        addresses = {"REDIS_URL": self.redis_url, "DATABASE_URL": self.info.database_url}
        settings = addresses | {"SERVICE_TOKEN": self.info.service_token}
        return bare_environment() | {f"TIERLANE_{name}": value for name, value in settings.items()}

    async def health(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.info.service_token}"}
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/internal/health", headers=headers) as r:
            return await r.json(content_type=None)

    async def healthy(self, gpus: int, timeout_s: float = 20.0) -> None:
        """Wait until health has so many GPUs and no reason, except a gateway that the test killed."""

        async def healthy() -> bool:
            health = await self.health()
            codes = {each["code"] for checks in health["checks"].values() for each in checks if "code" in each}
            return bool(health["healthy_gpus"] == gpus and codes <= {"gateway_lost"})

        await eventually(healthy, f"{gpus} healthy GPUs", timeout_s)

    async def rows(self, ids: list[str]) -> dict[str, list[asyncpg.Record]]:
        """The audit rows of these requests, by id."""
        connection = await asyncpg.connect(asyncpg_dsn(self.info.database_url))
        try:
            found = await connection.fetch("SELECT * FROM requests WHERE id = ANY($1)", ids)
        finally:
            await connection.close()
        rows: dict[str, list[asyncpg.Record]] = {i: [] for i in ids}
        for row in found:
            rows[row["id"]].append(row)
        return rows

    async def audited(self, ids: list[str]) -> dict[str, asyncpg.Record]:
        """One closed audit row for each id, once all exist; fails if an id has none or several."""

        async def closed() -> dict[str, asyncpg.Record]:
            rows = await self.rows(ids)
            assert [i for i, found in rows.items() if len(found) > 1] == []
            first = {i: found[0] for i, found in rows.items() if found}
            ended = {i: row for i, row in first.items() if row["status"] in ("completed", "failed")}
            return ended if len(ended) == len(ids) else {}

        return await eventually(closed, f"{len(ids)} closed audit rows", 20.0) if ids else {}


async def _server_name(cell: str, url: str) -> str:
    if url.startswith(CLUSTER_SCHEMES):
        return f"redis-{await ClusterFaults(url).owner() + 1}"
    return "redis" if cell == DEFAULT_CELL else f"redis-{cell}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def start_stack(home: Path, *options: str, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[Stack]:
    """Run `tierlane up` until the block ends; its output is in `<home>/up.log`. `environment` is added to that of the test.

    One gateway and one scheduler unless `options` say otherwise, since many tests compare the figures of a single one.
    """
    home.mkdir(exist_ok=True)
    form = () if "TIERLANE_REDIS_URL" in environment else EVERY_STACK
    whole = ["--ephemeral", "--port", "0", "--gateways", "1", "--schedulers", "1", *options, *form]
    clean = bare_environment() | DRAIN | dict(environment)
    with running_up(home, *whole, environment=clean, start_s=START_TIMEOUT_S, stop_s=STOP_TIMEOUT_S) as up:
        yield Stack(up.data_dir)
    assert up.process.returncode == 0, up.text[-3000:]
