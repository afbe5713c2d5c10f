"""A pool of one worker before an endpoint that asks to be left alone: a moment of that is no outage, a long time is one."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from endpoint_stand_in import StandIn, serving
from eventually import eventually
from integration.gateway_fixtures import Stack, running_stack
from integration.gpu_pool_fixtures import RunningWorker, StartWorker, faulty_models, start_worker
from integration.streaming_fixtures import scheduling
from pool import Pool

__all__ = ["faulty_models", "start_worker"]


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """Turns the first call away."""
    with serving(StandIn()) as server:
        faults = iter(["429"])
        server.fault = lambda route, body: next(faults, "") if body else ""
        yield server


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway, and batches of whatever waits; the test's worker is the only one."""
    async with running_stack(client, redis_url, worker=False) as running, scheduling(client):
        await running.worker.presence.worker_gone("worker-1")
        yield running


async def ready(stack: Stack, worker: RunningWorker) -> RunningWorker:
    """The worker, once it is ready and the gateway knows: one that has seen none for two seconds refuses."""
    await worker.reaches("ready")

    async def known() -> bool:
        _, document = await stack.internal("/internal/health")
        return bool(document["healthy_gpus"])

    await eventually(known, "the gateway knows of the worker")
    return worker


async def said(stack: Stack, words: str) -> tuple[int, str]:
    """The HTTP status and the status of health, once a reason has these words."""

    async def heard() -> tuple[int, str] | None:
        status, document = await stack.internal("/internal/health")
        return (status, document["status"]) if any(words in reason for reason in document["reasons"]) else None

    return await eventually(heard, f"health says: {words}", 10.0)


async def test_a_pause_of_a_moment_is_not_down(
    pool: Pool, stack: Stack, start_worker: StartWorker, stand_in: StandIn
) -> None:
    """Health calls it what it is, and the request that was turned away is answered after it."""
    stand_in.retry_after = "1"
    await ready(stack, await start_worker(backend=f"openai:{stand_in.url}"))

    first, told = stack.infer({"input": "hello"}), said(stack, "w1 pauses for a moment")
    (status, answer, _), found = await asyncio.gather(first, told)

    assert found == (200, "degraded")
    assert (status, answer["output"]) == (200, "olleh")


async def test_a_long_pause_is_down(pool: Pool, stack: Stack, start_worker: StartWorker, stand_in: StandIn) -> None:
    """As soon as the endpoint asks for it."""
    stand_in.retry_after = "20"
    worker = await ready(stack, await start_worker(backend=f"openai:{stand_in.url}"))

    status, answer, _ = await stack.infer({"input": "hello"})
    away = await worker.reaches("away")

    assert (away.healthy, away.pausing) == (False, False)
    assert status >= 500, answer
    assert await said(stack, "w1 is away") == (503, "down")
