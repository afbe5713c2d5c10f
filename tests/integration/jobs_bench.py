"""A gateway that serves jobs, over real servers: its database has the customers of a literal catalog."""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg
import msgspec
from redis.asyncio import Redis

from eventually import eventually
from gateway.config import JobConfig
from gateway.jobs.service import JobServing
from integration.gateway_fixtures import TIERS, LiteralCatalog, Stack, running_stack
from ledger.catalog.snapshot import Customer, Key, Tier

ASYNC = {"Prefer": "respond-async"}
Answered = tuple[int, dict[str, Any], dict[str, str]]


def customer_id(tier_name: str) -> str:
    """The customer of a tier, the same in every test."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, tier_name))


class JobCatalog(LiteralCatalog):
    """Customers with ids that PostgreSQL takes."""

    def _key(self, row: Tier, changes: dict[str, Any]) -> tuple[str, Key]:
        return super()._key(row, {"customer_id": customer_id(row.name)} | changes)

    def give_hosts(self, tier_name: str, hosts: str | None) -> None:
        """Replace the snapshot: the tier's customer has this list in its row."""
        assert self.snapshot is not None
        row = Customer(
            customer_id(tier_name), tier_name, tier_name, False, (1.0, 1.0, 1, None), 1, callback_hosts=hosts
        )
        self.snapshot = msgspec.structs.replace(self.snapshot, customers={row.id: row})


@dataclass
class JobBench:
    """A running gateway, and what a customer does with jobs."""

    stack: Stack
    db: "asyncpg.Connection[asyncpg.Record]"

    @property
    def serving(self) -> JobServing:
        serving = self.stack.gateway.jobs.serving
        assert serving is not None
        return serving

    async def submit(self, body: Any = None, tier_name: str = "free", **headers: str) -> Answered:
        """POST a job."""
        return await self.stack.infer(body, tier_name, **(ASYNC | headers))

    async def accepted(self, body: Any = None, tier_name: str = "free", **headers: str) -> str:
        """POST a job that is taken; its task id."""
        status, document, _ = await self.submit(body, tier_name, **headers)
        assert status == 202, document
        return str(document["task_id"])

    async def call(self, method: str, task_id: str, tier_name: str = "free") -> Answered:
        """GET or DELETE a result."""
        url = f"{self.stack.url}/v1/result/{task_id}"
        async with self.stack.http.request(method, url, headers=self.stack.key(tier_name)) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, json.loads(await answer.read()), headers

    async def get(self, task_id: str, tier_name: str = "free") -> Answered:
        return await self.call("GET", task_id, tier_name)

    async def ended(self, task_id: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """The result, once there is one."""

        async def look() -> dict[str, Any] | None:
            status, document, _ = await self.get(task_id)
            assert status == 200, document
            return None if document["status"] == "PENDING" else document

        document = await eventually(look, f"{task_id} has ended", timeout_s)
        assert document is not None
        return document

    async def row(self, task_id: str) -> asyncpg.Record:
        """The job's row."""
        row = await self.db.fetchrow("SELECT * FROM jobs WHERE id = $1", task_id)
        assert row is not None
        return row


@contextlib.asynccontextmanager
async def running_jobs(
    client: Redis,
    redis_url: str,
    database_url: str,
    db: "asyncpg.Connection[asyncpg.Record]",
    *,
    jobs: Mapping[str, Any] = {},
    **changes: Any,
) -> AsyncIterator[JobBench]:
    """A ready gateway whose keeper is the active one; `jobs` changes what it is told of jobs."""
    for name in TIERS:
        await db.execute(
            "INSERT INTO customers (id, name, tier) VALUES ($1, $2, $2) ON CONFLICT DO NOTHING", customer_id(name), name
        )
    config = JobConfig(**{"database_url": database_url} | dict(jobs))
    async with running_stack(client, redis_url, catalog=JobCatalog(), jobs=config, **changes) as stack:
        bench = JobBench(stack, db)
        await eventually(lambda: bench.serving.reconciler.active, "a keeper is active")
        yield bench
