"""A gateway with asynchronous jobs over real servers, and a client of it."""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import asyncpg
import msgspec
import pytest
from redis.asyncio import Redis

from configs import job_config
from eventually import eventually
from gateway.jobs.service import JobServing
from integration.gateway_fixtures import TIERS, LiteralCatalog, Stack, running_stack
from ledger.catalog.snapshot import Customer, Key, Tier

ASYNC = {"Prefer": "respond-async"}
Response: TypeAlias = tuple[int, dict[str, Any], dict[str, str]]


def customer_id(tier_name: str) -> str:
    """The id of a tier's customer, the same in every test."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, tier_name))


class JobCatalog(LiteralCatalog):
    """Customers with ids that PostgreSQL accepts."""

    def _key(self, row: Tier, changes: dict[str, Any]) -> tuple[str, Key]:
        return super()._key(row, {"customer_id": customer_id(row.name)} | changes)

    def set_hosts(self, tier_name: str, hosts: str | None) -> None:
        """Set the callback hosts of the tier's customer."""
        assert self.snapshot is not None
        row = Customer(
            customer_id(tier_name), tier_name, tier_name, False, (1.0, 1.0, 1, None), 1, callback_hosts=hosts
        )
        self.snapshot = msgspec.structs.replace(self.snapshot, customers={row.id: row})


@dataclass
class JobBench:
    """A running gateway, and the calls of a customer."""

    stack: Stack
    db: "asyncpg.Connection[asyncpg.Record]"

    @property
    def serving(self) -> JobServing:
        serving = self.stack.gateway.jobs.serving
        assert serving is not None
        return serving

    @property
    def catalog(self) -> JobCatalog:
        assert isinstance(self.stack.catalog, JobCatalog)
        return self.stack.catalog

    async def submit(self, body: Any = None, tier_name: str = "free", **headers: str) -> Response:
        """POST a job."""
        return await self.stack.infer(body, tier_name, **(ASYNC | headers))

    async def accepted(self, body: Any = None, tier_name: str = "free", **headers: str) -> str:
        """POST a job that is accepted; its task id."""
        status, document, _ = await self.submit(body, tier_name, **headers)
        assert status == 202, document
        return str(document["task_id"])

    async def call(self, method: str, task_id: str, tier_name: str = "free") -> Response:
        """GET or DELETE a result."""
        url = f"{self.stack.url}/v1/result/{task_id}"
        async with self.stack.http.request(method, url, headers=self.stack.key(tier_name)) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            document = json.loads(await response.read())
            self.metadata = document.pop("metadata", None)  # Its times differ.
            return response.status, document, headers

    async def secret(self, method: str, tier_name: str = "free", **body: Any) -> tuple[int, Any]:
        """Status and document of a call that reads (GET) or rotates (POST) the webhook secret."""
        url = f"{self.stack.url}/v1/webhook-secret" + ("/rotate" if method == "POST" else "")
        options = {"json": body} if body else {}
        async with self.stack.http.request(method, url, headers=self.stack.key(tier_name), **options) as response:
            return response.status, await response.json()

    async def get(self, task_id: str) -> Response:
        return await self.call("GET", task_id)

    async def ended(self, task_id: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """The result, once there is one."""

        async def result() -> dict[str, Any] | None:
            status, document, _ = await self.get(task_id)
            assert status == 200, document
            return None if document["status"] == "PENDING" else document

        document = await eventually(result, f"{task_id} has ended", timeout_s)
        assert document is not None
        return document

    async def row(self, task_id: str) -> asyncpg.Record:
        """The job's row."""
        row = await self.db.fetchrow("SELECT * FROM jobs WHERE id = $1", task_id)
        assert row is not None
        return row

    async def until(self, task_id: str, condition: Callable[[asyncpg.Record], bool], what: str) -> None:
        """Wait until `condition` holds for the job's row."""

        async def holds() -> bool:
            return condition(await self.row(task_id))

        await eventually(holds, what)


async def add_customers(db: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Insert the customers of a JobCatalog."""
    for name in TIERS:
        await db.execute(
            "INSERT INTO customers (id, name, tier) VALUES ($1, $2, $2) ON CONFLICT DO NOTHING", customer_id(name), name
        )


@contextlib.asynccontextmanager
async def running_jobs(
    client: Redis,
    redis_url: str,
    database_url: str,
    db: "asyncpg.Connection[asyncpg.Record]",
    *,
    jobs: Mapping[str, Any] = {},
) -> AsyncIterator[JobBench]:
    """A ready gateway whose reconciler is active; `jobs` changes its JobConfig."""
    await add_customers(db)
    config = job_config(database_url, **jobs)
    async with running_stack(client, redis_url, catalog=JobCatalog(), jobs=config) as stack:
        bench = JobBench(stack, db)
        await eventually(lambda: bench.serving.reconciler.active, "the reconciler is active")
        yield bench


StartJobs: TypeAlias = Callable[..., AbstractAsyncContextManager[JobBench]]


@pytest.fixture
def start_jobs(client: Redis, redis_url: str, database_url: str, db: "asyncpg.Connection[asyncpg.Record]") -> StartJobs:
    """Start a gateway with jobs; `jobs` changes its JobConfig."""
    return partial(running_jobs, client, redis_url, database_url, db)


@pytest.fixture
async def bench(start_jobs: StartJobs) -> AsyncIterator[JobBench]:
    """A gateway with jobs, and a worker."""
    async with start_jobs() as running:
        yield running
