"""Streams with the real `openai` client, through the whole of it: gateway, queue, worker, model, and back."""

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
from integration.streaming_fixtures import WHOLE, Scene, caller, first, reading, scene, scheduling, stack, texts
from pool import Pool

__all__ = ["caller", "faulty_models", "scene", "stack", "start_worker"]

PROMPT = "Once upon a time"


async def test_a_completion_comes_in_pieces(
    stack: Stack, caller: openai.AsyncOpenAI, start_worker: StartWorker
) -> None:
    """Together they are what the same request gets without a stream; the last chunks say why it ended and what it used."""
    await (await start_worker(backend="tiny", gpu_timeout_ms=20_000)).reaches("ready", 60.0)
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 100}

    whole = await caller.completions.create(**asked)
    stream = await caller.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]

    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].text
    assert len([piece for piece in pieces if piece]) > 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.object, chunk.model) for chunk in chunks}) == 1


async def test_a_piece_is_there_before_the_next_is_written(scene: Scene, caller: openai.AsyncOpenAI) -> None:
    """The client has the first word while the model waits to be let on: nothing on the way collects."""
    await scene.worker()
    scene.allow(1)
    stream = await reading(caller)

    begun = await first(stream)
    scene.allow(20)
    rest = await texts(stream)

    assert begun == "0 "
    assert begun + "".join(rest) == WHOLE
    assert await scene.end() == ("completed", "")


async def test_a_chat_says_who_speaks_first(
    stack: Stack, caller: openai.AsyncOpenAI, start_worker: StartWorker
) -> None:
    """The role comes on admission; a model that makes its answer in one step sends it as one delta."""
    asking = asyncio.create_task(
        caller.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True, max_tokens=5
        )
    )
    stream = await asking
    opening = await anext(aiter(stream))
    await start_worker(backend="simulated:5")
    chunks = [chunk async for chunk in stream]

    assert (opening.choices[0].delta.role, opening.choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["olleh", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]
    assert {chunk.object for chunk in [opening, *chunks]} == {"chat.completion.chunk"}
    assert stream.response.headers["content-type"] == "text/event-stream"
    assert stream.response.headers["x-request-id"] == opening.id
    assert "x-ratelimit-limit-requests" in stream.response.headers


async def test_the_blocking_client_reads_streams(stack: Stack, scene: Scene) -> None:
    """The same from a thread, as most scripts do it."""
    await scene.worker()
    scene.allow(20)
    key = stack.catalog.keys["free"].text

    def read() -> list[str]:
        with openai.OpenAI(api_key=key, base_url=f"{stack.url}/v1", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "go"}], stream=True
            )
            return [chunk.choices[0].delta.content or "" for chunk in stream]

    assert "".join(await asyncio.to_thread(read)) == WHOLE


async def test_who_leaves_stops_the_model(stack: Stack, scene: Scene, caller: openai.AsyncOpenAI) -> None:
    """The request ends as cancelled while its batch runs, and the model hears that it may stop."""
    await scene.worker()
    scene.allow(2)
    stream = await reading(caller)
    await first(stream)

    await stream.close()

    assert await scene.end() == ("failed", "cancelled")
    await eventually(lambda: scene.model_was_told, "the model stops", 10.0)
    assert len(stack.gateway.pending_requests) == 0


async def test_only_who_left_is_dropped(client: Redis, redis_url: str, scene: Scene) -> None:
    """Beside it in the batch somebody else reads on to the end."""
    async with (
        running_stack(client, redis_url, total_ms=30_000) as stack,
        scheduling(client, fewest=2),  # In two batches, the second one would wait for the first for ever.
        openai_client(stack) as asks,
    ):
        stack.worker.hold = True
        worker = await scene.worker()
        streams = await asyncio.gather(reading(asks), reading(asks))
        scene.allow(1)
        for stream in streams:
            await first(stream)

        await streams[0].close()
        assert await scene.end() == ("failed", "cancelled")
        scene.allow(20)

        assert "".join(await texts(streams[1])) == WHOLE.removeprefix("0 ")
        assert worker.model_pid is not None


async def test_a_lost_model_is_not_seen_before_the_first_piece(scene: Scene, caller: openai.AsyncOpenAI) -> None:
    """Nothing was written yet, so the next run writes all of it."""
    worker = await scene.worker()
    stream = await reading(caller)
    await scene.runs()
    model = worker.model_pid
    assert model is not None

    kill(model)
    scene.allow(20)

    assert "".join(await texts(stream)) == WHOLE


@pytest.mark.parametrize("victim", ["model", "worker"])
async def test_a_loss_after_the_first_piece_ends_the_stream(
    scene: Scene, caller: openai.AsyncOpenAI, victim: str
) -> None:
    """What was said cannot be taken back: the client's exception names the reason, and so does the audit."""
    workers = {name: await scene.worker(name) for name in ("w1", "w2")}
    stream = await reading(caller)
    running = workers[await scene.runs()]
    scene.allow(1)
    await first(stream)
    model = running.model_pid
    assert model is not None

    kill(model if victim == "model" else running.process.pid)
    with pytest.raises(openai.APIError) as caught:
        await texts(stream)

    assert caught.value.code == "worker_lost"
    assert await scene.end() == ("failed", "worker_lost")


async def test_nothing_is_missing_after_a_lost_subscription(
    stack: Stack, scene: Scene, caller: openai.AsyncOpenAI
) -> None:
    """What was published meanwhile is gone; the stored reply has it."""
    await scene.worker()
    scene.allow(1)
    stream = await reading(caller)
    begun = await first(stream)

    await stack.redis.client_kill_filter(_type="pubsub")
    scene.allow(20)

    assert begun + "".join(await texts(stream)) == WHOLE
    assert stack.gateway.subscriber.reconnects > 0


async def test_a_fault_of_the_model_ends_the_stream_with_its_code(scene: Scene, caller: openai.AsyncOpenAI) -> None:
    """A model that raises in the middle: its input is taken for the reason, as without a stream."""
    await scene.worker()
    scene.allow(1)
    stream = await reading(caller, "stumble")

    with pytest.raises(openai.APIError) as caught:
        await texts(stream)

    assert caught.value.code == "poison_request"


def kill(pid: int) -> None:
    """As power loss would."""
    os.kill(pid, signal.SIGKILL)


async def test_a_stream_that_runs_out_of_time_is_charged_and_its_model_lives(
    client: Redis, redis_url: str, scene: Scene, pool: Pool
) -> None:
    """Longer than any run of a batch may be, it is ended by its own deadline: what was delivered counts against quota and
    tokens, the row says how many, and the model process goes on with the next.
    """
    async with (
        running_stack(client, redis_url, total_ms=2500) as stack,
        scheduling(client),
        openai_client(stack) as asks,
    ):
        stack.worker.hold = True
        stack.catalog.set(key={"quotas": (("1day", 5),), "tokens_per_minute": 1000.0})
        worker = await scene.worker(gpu_timeout_ms=600)
        model = worker.model_pid
        scene.allow(3)

        with pytest.raises(openai.APIError) as caught:
            await texts(await reading(asks))

        assert caught.value.code == "deadline_exceeded"
        assert await scene.end() == ("failed", "deadline_exceeded")
        ((end,), (spent, budget)) = (
            (await pool.audit())[1],
            await client.hmget("rl:customer:customer-free", "q:1day", "budget"),
        )
        assert spent.split()[1] == b"1"
        assert end.tokens_used == 2  # "go" and "0 1 2 ", in fours of bytes
        assert float(budget) <= 1000 - end.tokens_used
        await eventually(lambda: scene.model_was_told, "the model has heard that its time is over")
        assert worker.model_pid == model
