"""A gateway with real workers, whose model generates its output word by word as far as a test allows it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from configs import LEASE_MS
from eventually import eventually
from integration.gateway_fixtures import TIERS, LiteralCatalog, Stack, caller, running_stack, tier
from integration.gpu_pool_fixtures import RunningWorker, StartWorker
from pool import Pool
from scheduler.errors import RedisUnavailable
from scheduler.protocol.batches import Batches
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.pool_view import with_background
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all

__all__ = ["Model", "caller", "first", "model", "reading", "scheduling", "stack", "texts"]

OUTPUT = "".join(f"{n} " for n in range(20))


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway and a scheduler; tests start the workers.

    The stack's own worker only sends heartbeats: without a healthy worker the gateway rejects requests. Requests may wait
    for a worker until their deadline, because many are sent at once to one worker.
    """
    catalog = LiteralCatalog()
    catalog.set(tuple(tier(name, number, 0.1, max_queue_ms=30_000) for number, name in enumerate(TIERS, 1)))
    async with running_stack(client, redis_url, catalog=catalog, total_ms=30_000) as running, scheduling(client):
        running.worker.hold = True
        yield running


@asynccontextmanager
async def scheduling(client: Redis, fewest: int = 1) -> AsyncIterator[None]:
    """Form a batch whenever at least `fewest` requests are queued, and reap lost batches."""
    batches = Batches(client, Keys(), lease_ms=LEASE_MS)
    terminations = Terminations(client, Keys(), lease_ms=LEASE_MS)
    queues = with_background(TIERS)

    async def schedule() -> None:
        count = 0
        while True:
            await asyncio.sleep(0.005)
            with contextlib.suppress(RedisUnavailable):
                await terminations.reap(0)
                lists = await client.llen("queue:free"), await client.llen("queue:free.background")
                if sum(lists) + int(await client.get("waiting:free") or 0) >= fewest:
                    count += 1
                    await batches.form(f"formed-{count}", [(name, 32) for name in queues], 1, queues)

    task = asyncio.create_task(schedule())
    try:
        yield
    finally:
        await end_all([task])


class Model:
    """Workers whose model generates `OUTPUT`, a word at a time."""

    def __init__(self, start: StartWorker, home: Path, pool: Pool) -> None:
        self._start = start
        self._home = home
        self._pool = pool

    async def start_worker(self, name: str = "w1", gpu_timeout_ms: int = 20_000) -> RunningWorker:
        """Start a worker and wait until it is ready."""
        worker = await self._start(name, "faulty_models:Writer", gpu_timeout_ms=gpu_timeout_ms)
        await worker.reaches("ready", 60.0)
        return worker

    def allow(self, words: int) -> None:
        """Allow the model to generate so many words in all."""
        (self._home / "steps.new").write_text(str(words))
        (self._home / "steps.new").rename(self._home / "steps")

    @property
    def stopped(self) -> bool:
        """Whether a model was stopped because no client wants its output."""
        return (self._home / "left").exists()

    async def running_worker(self) -> str:
        """Wait until a worker runs the one batch; return the worker's name."""

        async def owner() -> str:
            for batch_id in await self._pool.client.zrange(self._pool.keys.leases, 0, -1):
                name = await self._pool.client.hget(self._pool.keys.batch(batch_id.decode()), "worker")
                return name.decode() if name else ""
            return ""

        return await eventually(owner, "a worker runs the batch", 20.0)

    async def end(self) -> tuple[str, str]:
        """Wait until the audit has an end; return its state and code."""

        async def ended() -> tuple[str, str] | None:
            ends = (await self._pool.audit())[1]
            return (str(ends[0].state), str(ends[0].error_code)) if ends else None

        found = await eventually(ended, "the request has ended", 20.0)
        assert found is not None
        return found


@pytest.fixture
def model(start_worker: StartWorker, faulty_models: Path, pool: Pool) -> Model:
    """Workers whose model waits for the test."""
    return Model(start_worker, faulty_models, pool)


def reading(caller: openai.AsyncOpenAI, prompt: str = "go", **options: Any) -> Any:
    """Request a stream of completions."""
    return caller.completions.create(model="tiny", prompt=prompt, stream=True, **options)


async def texts(stream: Any) -> list[str]:
    """Return the pieces of a stream of completions, without the empty ones."""
    return [chunk.choices[0].text async for chunk in stream if chunk.choices and chunk.choices[0].text]


async def first(stream: Any) -> str:
    """Return the first piece of a stream of completions."""
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            return str(chunk.choices[0].text)
    raise AssertionError("The stream ended without a piece.")
