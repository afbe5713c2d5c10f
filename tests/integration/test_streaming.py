"""Streams with the real `openai` client through gateway, queue, worker and model process, and the loss of each."""

import asyncio
import os
import signal
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import Stack, openai_client, running_stack
from integration.gpu_pool_fixtures import StartWorker, faulty_models, start_worker
from integration.streaming_fixtures import OUTPUT, Model, caller, first, model, reading, scheduling, stack, texts
from pool import Pool

__all__ = ["caller", "faulty_models", "model", "stack", "start_worker"]


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_a_stream_equals_the_response_without_a_stream(
    stack: Stack, caller: openai.AsyncOpenAI, start_worker: StartWorker
) -> None:
    """The pieces together are the whole text; the last chunks have the finish reason and the usage."""
    await (await start_worker(backend="tiny", gpu_timeout_ms=20_000)).reaches("ready", 60.0)
    options: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 100}

    whole = await caller.completions.create(**options)
    stream = await caller.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]

    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].text
    assert len([piece for piece in pieces if piece]) > 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.object, chunk.model) for chunk in chunks}) == 1


async def test_pieces_are_delivered_as_they_are_generated(
    stack: Stack, model: Model, caller: openai.AsyncOpenAI
) -> None:
    """The client has the first piece while the model waits. Pieces published during a lost subscription are read from
    the stored output.
    """
    await model.start_worker()
    model.allow(1)
    stream = await reading(caller)
    begun = await first(stream)
    await stack.redis.client_kill_filter(_type="pubsub")
    model.allow(20)

    assert begun == "0 "
    assert begun + "".join(await texts(stream)) == OUTPUT
    assert stack.gateway.subscriber.reconnects > 0
    assert await model.end() == ("completed", "")


async def test_a_disconnected_client_stops_its_own_stream(client: Redis, redis_url: str, model: Model) -> None:
    """The request ends as cancelled while its batch runs; another request of the batch is completed. When all clients of
    a batch have disconnected, the model is stopped.
    """
    async with (
        running_stack(client, redis_url, total_ms=30_000) as stack,
        scheduling(client, fewest=2),  # One batch: a second one would wait for the first.
        openai_client(stack) as caller,
    ):
        stack.worker.hold = True
        worker = await model.start_worker()
        streams = await asyncio.gather(reading(caller), reading(caller))
        model.allow(1)
        for stream in streams:
            await first(stream)

        await streams[0].close()
        assert await model.end() == ("failed", "cancelled")
        assert not model.stopped
        model.allow(20)
        assert "".join(await texts(streams[1])) == OUTPUT.removeprefix("0 ")

        model.allow(2)
        streams = await asyncio.gather(reading(caller), reading(caller))
        for stream in streams:
            await first(stream)
            await stream.close()
        await eventually(lambda: model.stopped, "the model is stopped", 10.0)
        assert (worker.model_pid is not None, len(stack.gateway.pending_requests)) == (True, 0)


async def test_a_model_lost_before_the_first_piece(model: Model, caller: openai.AsyncOpenAI) -> None:
    """The client does not notice: the next run writes the whole output."""
    worker = await model.start_worker()
    stream = await reading(caller)
    await model.running_worker()

    kill(worker.model_pid)
    model.allow(20)

    assert "".join(await texts(stream)) == OUTPUT


@pytest.mark.parametrize("victim", ["model", "worker"])
async def test_a_loss_after_the_first_piece_ends_the_stream(
    model: Model, caller: openai.AsyncOpenAI, victim: str
) -> None:
    """Delivered pieces cannot be taken back: the client's exception and the audit have `worker_lost`."""
    workers = {name: await model.start_worker(name) for name in ("w1", "w2")}
    stream = await reading(caller)
    worker = workers[await model.running_worker()]
    model.allow(1)
    await first(stream)

    kill(worker.model_pid if victim == "model" else worker.process.pid)
    with pytest.raises(openai.APIError) as caught:
        await texts(stream)

    assert caught.value.code == "worker_lost"
    assert await model.end() == ("failed", "worker_lost")


async def test_an_exception_of_the_model_ends_the_stream(model: Model, caller: openai.AsyncOpenAI) -> None:
    """When the model raises in the middle, the input counts as the cause, as without a stream."""
    await model.start_worker()
    model.allow(1)
    stream = await reading(caller, "stumble")

    with pytest.raises(openai.APIError) as caught:
        await texts(stream)

    assert caught.value.code == "poison_request"


async def test_a_stream_that_exceeds_its_deadline_is_charged(
    client: Redis, redis_url: str, model: Model, pool: Pool
) -> None:
    """The stream ends by its own deadline, later than a batch may run. The delivered pieces count against quota and token
    limit, the audit row has their number, and the model process is kept.
    """
    async with (
        running_stack(client, redis_url, total_ms=2500) as stack,
        scheduling(client),
        openai_client(stack) as caller,
    ):
        stack.worker.hold = True
        stack.catalog.set(key={"quotas": (("1day", 5),), "tokens_per_minute": 1000.0})
        worker = await model.start_worker(gpu_timeout_ms=600)
        pid = worker.model_pid
        model.allow(3)

        with pytest.raises(openai.APIError) as caught:
            await texts(await reading(caller))

        assert caught.value.code == "deadline_exceeded"
        assert await model.end() == ("failed", "deadline_exceeded")
        (end,) = (await pool.audit())[1]
        spent, budget = await client.hmget("rl:customer:customer-free", "q:1day", "budget")
        assert spent.split()[1] == b"1"
        assert end.tokens_used == 2  # "go" and "0 1 2 ", by four bytes.
        assert float(budget) <= 1000 - end.tokens_used
        await eventually(lambda: model.stopped, "the model is stopped")
        assert worker.model_pid == pid
