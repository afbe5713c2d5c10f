"""Jobs of a model whose equal requests share a run or a cached result."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import model
from integration.jobs_bench import JobBench, running_jobs
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["database_url", "db", "postgres_server"]

Db = asyncpg.Connection
HELLO = {"status": "SUCCESS", "output": "olleh"}


@pytest.fixture
async def bench(client: Redis, redis_url: str, database_url: str, db: Db) -> AsyncIterator[JobBench]:
    """A gateway with jobs and a worker, whose model's answers are kept for a minute."""
    async with running_jobs(client, redis_url, database_url, db) as running:
        running.stack.catalog.set(models=(model(cache_ttl_s=60),))
        await eventually(lambda: running.stack.gateway.heartbeat.model_version, "the version is known")
        yield running


async def test_a_job_gets_the_answer_that_is_kept(bench: JobBench) -> None:
    """A cached result serves jobs and synchronous requests, whichever was first."""
    first = await bench.accepted({"input": "hello"})
    assert await bench.ended(first) == HELLO
    second = await bench.accepted({"input": "hello"})
    assert await bench.ended(second) == HELLO
    status, document, _ = await bench.stack.infer()

    assert (status, document["output"], document["metadata"]["cached"]) == (200, "olleh", True)
    assert bench.stack.worker.seen == [first]


async def test_jobs_and_clients_ride_with_each_other(bench: JobBench) -> None:
    """Jobs and synchronous requests share one run, and each ends."""
    bench.stack.worker.hold = True
    jobs = [await bench.accepted({"input": "hello"}) for _ in range(3)]
    waiting = asyncio.create_task(bench.stack.infer())
    await eventually(lambda: len(bench.stack.gateway.pending_requests) == 1, "one waits")
    bench.stack.worker.hold = False

    status, document, _ = await waiting
    assert (status, document["output"]) == (200, "olleh")
    assert [await bench.ended(job) for job in jobs] == [HELLO] * 3
    assert len(bench.stack.worker.seen) == 1


async def test_a_cancelled_job_leaves_its_run_to_the_others(bench: JobBench) -> None:
    """After the first of two jobs is cancelled, the second still gets its result."""
    bench.stack.worker.hold = True
    first, second = [await bench.accepted({"input": "hello"}) for _ in range(2)]
    status, document, _ = await bench.call("DELETE", first)
    bench.stack.worker.hold = False

    assert (status, document["status"]) == (200, "FAILURE")
    assert await bench.ended(second) == HELLO
