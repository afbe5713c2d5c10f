"""A gateway with a real worker behind it, whose model writes step by step as far as a test lets it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import TIERS, Stack, openai_client, running_stack
from integration.gpu_pool_fixtures import RunningWorker, StartWorker
from pool import Pool
from scheduler.errors import RedisUnavailable
from scheduler.protocol.batches import Batches
from scheduler.protocol.cancellation import Terminations
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all

__all__ = ["Scene", "caller", "reading", "scene", "stack", "texts"]

EVERY_S = 0.005
WHOLE = "".join(f"{n} " for n in range(20))
PATIENT = {"gpu_timeout_ms": 20_000}
"""Of a worker whose model waits for a test."""


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway, and batches of whatever waits; workers are the test's matter. One more beats, and takes nothing:
    a gateway that sees none for two seconds refuses.
    """
    async with running_stack(client, redis_url, total_ms=30_000) as running, scheduling(client):
        running.worker.hold = True
        yield running


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, without retries of its own."""
    async with openai_client(stack) as made:
        yield made


@asynccontextmanager
async def scheduling(client: Redis, fewest: int = 1) -> AsyncIterator[None]:
    """As a scheduler would: whatever waits becomes a batch once there are so many, and lost batches are found."""
    batches, terminations = Batches(client, Keys()), Terminations(client, Keys())

    async def schedule() -> None:
        count = 0
        while True:
            await asyncio.sleep(EVERY_S)
            with contextlib.suppress(RedisUnavailable):
                await terminations.reap(0)
                if await client.llen("queue:free") >= fewest:
                    count += 1
                    await batches.form(f"formed-{count}", [(name, 32) for name in TIERS], 1, TIERS)

    task = asyncio.create_task(schedule())
    try:
        yield
    finally:
        await end_all([task])


class Scene:
    """A worker whose model writes `WHOLE`, a word whenever it is allowed to."""

    def __init__(self, start: StartWorker, home: Path, pool: Pool) -> None:
        self._start = start
        self._home = home
        self._pool = pool

    async def worker(self, name: str = "w1", **changes: Any) -> RunningWorker:
        """Start one; it is ready."""
        worker = await self._start(name, "faulty_models:Writer", **PATIENT | changes)
        await worker.reaches("ready", 60.0)
        return worker

    def allow(self, words: int) -> None:
        """The model may write so many words in all."""
        (self._home / "steps.new").write_text(str(words))
        (self._home / "steps.new").rename(self._home / "steps")

    @property
    def model_was_told(self) -> bool:
        """Whether a model has heard that nobody wants its words."""
        return (self._home / "left").exists()

    async def runs(self) -> str:
        """Wait until a worker runs the one batch; the worker's name."""

        async def owner() -> str:
            for batch_id in await self._pool.client.zrange(self._pool.keys.leases, 0, -1):
                name = await self._pool.client.hget(self._pool.keys.batch(batch_id.decode()), "worker")
                return name.decode() if name else ""
            return ""

        return await eventually(owner, "a worker runs the batch", 20.0)

    async def end(self) -> tuple[str, str]:
        """Wait until the audit has an end; its state and code."""

        async def ended() -> tuple[str, str] | None:
            ends = (await self._pool.audit())[1]
            return (str(ends[0].state), str(ends[0].error_code)) if ends else None

        return await eventually(ended, "the request has ended", 20.0)


@pytest.fixture
def scene(start_worker: StartWorker, faulty_models: Path, pool: Pool) -> Scene:
    """Workers whose model waits for the test."""
    return Scene(start_worker, faulty_models, pool)


def reading(caller: openai.AsyncOpenAI, prompt: str = "go", **options: Any) -> Any:
    """Ask for a stream of completions."""
    return caller.completions.create(model="tiny", prompt=prompt, stream=True, **options)


async def texts(stream: Any) -> list[str]:
    """The pieces of a stream of completions, the empty ones left out."""
    return [chunk.choices[0].text async for chunk in stream if chunk.choices and chunk.choices[0].text]


async def first(stream: Any) -> str:
    """The first piece of a stream of completions."""
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            return str(chunk.choices[0].text)
    raise AssertionError("The stream ended without a piece.")
