"""A gateway with files and batches over real servers, and OpenAI's client of it."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import asyncpg
import msgspec
import openai
import pytest
from openai.types import Batch
from redis.asyncio import Redis

from configs import batch_config, job_config
from eventually import eventually
from integration.gateway_fixtures import Stack, openai_client, reverse_or_vector, running_stack
from integration.jobs_fixtures import JobCatalog, add_customers, customer_id
from ledger.catalog.snapshot import Customer

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"


class BatchCatalog(JobCatalog):
    """Customers as rows too."""

    def set(self, *arguments: Any, **changes: Any) -> None:
        super().set(*arguments, **changes)
        assert self.snapshot is not None
        rows = [
            Customer(customer_id(tier.name), tier.name, tier.name, False, tier.limits, tier.max_queue_ms)
            for tier in self.snapshot.tiers
        ]
        self.snapshot = msgspec.structs.replace(self.snapshot, customers={row.id: row for row in rows})


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """A line of an input file; its prompt is its id, unless `body` has other fields."""
    default = {"model": "tiny", "prompt": custom_id}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or default}


def jsonl(lines: Sequence[Any]) -> bytes:
    """An input file; texts are lines as they are."""
    return b"".join((each.encode() if isinstance(each, str) else json.dumps(each).encode()) + b"\n" for each in lines)


@dataclass
class BatchBench:
    """A running gateway, and OpenAI's client of the free customer."""

    stack: Stack
    db: "asyncpg.Connection[asyncpg.Record]"
    client: openai.AsyncOpenAI

    @property
    def catalog(self) -> BatchCatalog:
        assert isinstance(self.stack.catalog, BatchCatalog)
        return self.stack.catalog

    async def upload(self, lines: Sequence[Any]) -> str:
        """Upload an input file; its id."""
        file = await self.client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
        return file.id

    async def create(self, lines: Sequence[Any], endpoint: Any = "/v1/completions", **fields: Any) -> Batch:
        """Create a batch of these lines."""
        file_id = await self.upload(lines)
        return await self.client.batches.create(
            input_file_id=file_id, endpoint=endpoint, completion_window="24h", **fields
        )

    async def until(self, batch_id: str, *statuses: str, timeout_s: float = 20.0) -> Batch:
        """The batch, once it has one of these statuses; without any, once it has ended."""

        async def reached() -> Batch | None:
            batch = await self.client.batches.retrieve(batch_id)
            return batch if batch.status in (statuses or ENDED) else None

        batch = await eventually(reached, f"{batch_id} is {statuses or 'ended'}", timeout_s)
        assert batch is not None
        return batch

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a result file; none without a file."""
        if file_id is None:
            return []
        content = await self.client.files.content(file_id)
        return [json.loads(each) for each in content.text.splitlines()]


@contextlib.asynccontextmanager
async def running_batches(
    client: Redis,
    redis_url: str,
    database_url: str,
    db: "asyncpg.Connection[asyncpg.Record]",
    *,
    batches: Mapping[str, Any] = {},
    **changes: Any,
) -> AsyncIterator[BatchBench]:
    """A ready gateway; `batches` changes its BatchConfig, `changes` the rest of its configuration."""
    await add_customers(db)
    settings = {
        "catalog": BatchCatalog(),
        "jobs": job_config(database_url),
        "batches": batch_config(database_url, **batches),
    }
    async with running_stack(client, redis_url, **settings | changes) as stack:
        stack.worker.answerer = reverse_or_vector
        async with openai_client(stack) as caller:
            yield BatchBench(stack, db, caller)


StartBatches: TypeAlias = Callable[..., AbstractAsyncContextManager[BatchBench]]


@pytest.fixture
def start_batches(
    client: Redis, redis_url: str, database_url: str, db: "asyncpg.Connection[asyncpg.Record]"
) -> StartBatches:
    """Start a gateway with batches; `batches` changes its BatchConfig."""
    return partial(running_batches, client, redis_url, database_url, db)


@pytest.fixture
async def bench(start_batches: StartBatches) -> AsyncIterator[BatchBench]:
    """A gateway with batches, and a worker."""
    async with start_batches() as running:
        yield running
