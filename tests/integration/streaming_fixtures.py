"""A gateway with a real worker behind it, whose model writes step by step, and what a client saw of a stream."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from gateway.endless import end_all
from integration.gateway_fixtures import TIERS, Stack, running_stack
from integration.gpu_pool_fixtures import RunningWorker, StartWorker
from scheduler.batches import Batches
from scheduler.keys import Keys

FORM_EVERY_S = 0.005

StartStreaming = Callable[..., Awaitable[RunningWorker]]


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway, and batches of whatever waits; workers are the test's matter."""
    async with running_stack(client, redis_url, worker=False, total_ms=20_000) as running, forming(client):
        yield running


@asynccontextmanager
async def forming(client: Redis) -> AsyncIterator[None]:
    """As a scheduler would: whatever waits becomes a batch, and lost batches are found."""
    batches = Batches(client, Keys())

    async def form() -> None:
        count = 0
        while True:
            await asyncio.sleep(FORM_EVERY_S)
            if await client.llen("queue:free"):
                count += 1
                await batches.form(f"formed-{count}", [(name, 32) for name in TIERS], 1, TIERS)

    task = asyncio.create_task(form())
    try:
        yield
    finally:
        await end_all([task])


async def texts(stream: Any) -> list[str]:
    """The pieces of a stream of completions, the empty ones left out."""
    return [chunk.choices[0].text async for chunk in stream if chunk.choices and chunk.choices[0].text]


def sync_client(stack: Stack) -> openai.OpenAI:
    """OpenAI's client that blocks; for a thread."""
    return openai.OpenAI(api_key=stack.catalog.keys["free"].text, base_url=f"{stack.url}/v1", max_retries=0)


__all__ = ["RunningWorker", "StartWorker", "forming", "stack", "sync_client", "texts"]
