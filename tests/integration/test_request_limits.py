"""Time and size of a request follow the backend of its pool: a function's are tight, an endpoint gets what agents send."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from configs import endpoint_access
from endpoint_stand_in import StandIn
from eventually import eventually
from integration.endpoint_fixtures import stand_in
from integration.gateway_fixtures import LiteralCatalog, Stack, TestWorker, model, openai_client, running_stack, tier
from integration.gpu_pool_fixtures import StartWorker, faulty_models, start_worker
from integration.streaming_fixtures import scheduling
from ratelimit.request_limits import FUNCTION, LANGUAGE_MODEL
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all

__all__ = ["faulty_models", "stand_in", "start_worker"]

ENDPOINT = "openai:http://127.0.0.1:1"
LAST = {"role": "user", "content": "go"}
"""The stand-in answers this message alone."""

ONE: list[Any] = [{"role": "user", "content": "word " * 800_000}, LAST]
MANY: list[Any] = [*({"role": ("user", "assistant")[i % 2], "content": "word " * 80} for i in range(9999)), LAST]


async def asked(stack: Stack, name: str, size: int) -> tuple[int, str]:
    """Status and error message of a chat with so many bytes of text; (0, "") if it was admitted and waits."""
    body = {"model": name, "messages": [{"role": "user", "content": "x" * size}]}
    pools = stack.gateway.pools.all
    sent = asyncio.create_task(stack.http.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.key()))
    try:
        await eventually(
            lambda: sent.done() or any(p.accepted for each in pools for p in each.pending_requests.all()), "an outcome"
        )
        if not sent.done():
            return 0, ""
        response = await sent
        return response.status, json.loads(await response.read())["error"]["message"]
    finally:
        await end_all([sent])


def waits(stack: Stack) -> list[tuple[int, int]]:
    """Total and queue time of all pending requests, in ms."""
    pending = [p for each in stack.gateway.pools.all for p in each.pending_requests.all()]
    return [(each.submission.total_ms, each.submission.queue_ms) for each in pending]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("beside_redis", [False, True])
async def test_four_megabytes_of_text_reach_an_endpoint_whole(
    client: Redis, redis_url: str, stand_in: StandIn, start_worker: StartWorker, tmp_path: Path, beside_redis: bool
) -> None:
    """In one text or in 10,000 messages, several at a time, streamed and whole, through Redis and beside it."""
    bodies = tmp_path / "bodies" if beside_redis else None
    catalog = LiteralCatalog()
    catalog.set(tiers=(tier("free", 1, 0.1, max_queue_ms=None),), key={"max_queue_ms": None})
    async with (
        running_stack(client, redis_url, body_dir=bodies, catalog=catalog) as stack,
        scheduling(client),
        openai_client(stack) as caller,
    ):
        stack.worker.hold, stack.worker.backend = True, f"openai:{stand_in.url}"
        await eventually(lambda: stack.gateway.limits.request == LANGUAGE_MODEL, "the pool has an endpoint")
        access = endpoint_access(body_dir=str(bodies or ""))
        worker = await start_worker(backend=f"openai:{stand_in.url}", endpoint=access, gpu_timeout_ms=30_000)
        await worker.reaches("ready")

        async def whole(messages: list[Any]) -> str:
            response = await caller.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
            return str(response.choices[0].finish_reason)

        async def streamed(messages: list[Any]) -> str:
            stream = await caller.chat.completions.create(model="tiny", messages=messages, max_tokens=4, stream=True)
            reasons = [choice.finish_reason async for chunk in stream for choice in chunk.choices]
            return str(reasons[-1])

        ends = await asyncio.gather(*(send(messages) for send in (whole, streamed) for messages in (ONE, MANY)))

        assert set(ends) <= {"stop", "length"}
        sent = [each["messages"] for each in stand_in.asked("chat/completions")]
        assert [sent.count(messages) for messages in (ONE, MANY)] == [2, 2]


async def test_limits_change_with_the_backend_of_the_pool(client: Redis, redis_url: str) -> None:
    """From a function, whose error names the setting, to an endpoint; they hold while no worker is known."""
    catalog = LiteralCatalog()
    catalog.set(tiers=(tier("free", 1, 0.1, max_queue_ms=None),), key={"max_queue_ms": None})
    async with running_stack(client, redis_url, catalog=catalog) as stack:
        stack.worker.hold = True
        await eventually(lambda: stack.gateway.limits.request == FUNCTION, "the pool has a function")
        status, message = await asked(stack, "tiny", 300_000)
        assert (status, "TIERLANE_MAX_BODY_BYTES" in message) == (413, True)
        waiting = asyncio.create_task(stack.infer())
        await eventually(lambda: waits(stack) == [(FUNCTION.total_ms, FUNCTION.queue_ms)], "one waits")
        await end_all([waiting])

        stack.worker.backend = ENDPOINT
        await eventually(lambda: stack.gateway.limits.request == LANGUAGE_MODEL, "the pool has an endpoint")
        assert await asked(stack, "tiny", 300_000) == (0, "")
        waiting = asyncio.create_task(stack.infer())
        expected = (LANGUAGE_MODEL.total_ms, LANGUAGE_MODEL.queue_ms)
        await eventually(lambda: expected in waits(stack), "one waits")
        await end_all([waiting])


async def test_a_function_beside_an_endpoint_keeps_its_limits(client: Redis, redis_url: str) -> None:
    """A body is read before its pool is known: the limits of the pool apply once it is."""
    catalog = LiteralCatalog()
    catalog.set(models=(model(), model("far", pool="other")))
    async with running_stack(client, redis_url, catalog=catalog) as stack:
        other = TestWorker(client, Keys("other"))
        other.hold, other.backend = True, ENDPOINT
        beating = asyncio.create_task(other.run())
        try:
            await eventually(
                lambda: [each.limits.request for each in stack.gateway.pools.all] == [FUNCTION, LANGUAGE_MODEL],
                "both pools are known",
            )
            for size, what in ((300_000, "The body of a request to this model"), (200_000, "The text of a request")):
                status, message = await asked(stack, "tiny", size)
                assert (status, message.startswith(what)) == (413, True)
            assert await asked(stack, "far", 300_000) == (0, "")
        finally:
            await end_all([beating])


async def test_explicit_settings_win(client: Redis, redis_url: str) -> None:
    """Before a function and before an endpoint."""
    async with (
        running_stack(client, redis_url, total_ms=7000, max_body_bytes=400_000) as stack,
        openai_client(stack) as caller,
    ):
        for backend in ("simulated", ENDPOINT):
            stack.worker.backend = backend
            await eventually(lambda: stack.gateway.limits.request.total_ms == 7000, "the setting holds")
            with pytest.raises(openai.APIStatusError, match="400000 bytes"):
                await caller.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "x" * 400_000}]
                )
