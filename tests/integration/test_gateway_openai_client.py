"""The real `openai` client against a gateway that refuses: it waits as it is told, and gives up where it is told to."""

import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from integration.gateway_fixtures import Stack, openai_client, running_stack


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url) as running:
        yield running


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client as it comes: it tries twice more by itself."""
    async with openai_client(stack, retries=2) as made:
        yield made


async def infer(caller: openai.AsyncOpenAI) -> dict[str, Any]:
    document: dict[str, Any] = await caller.post("/inference", cast_to=dict[str, Any], body={"input": "hello"})
    return document


async def test_it_waits_as_long_as_it_is_told_and_succeeds(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """A spent bucket of one request in two seconds: the second call is refused inside, and answered by its retry."""
    counted: list[str] = []
    stack.gateway._demand_meter.retried = counted.append  # type: ignore[method-assign]
    stack.catalog.set(key={"requests_per_second": 0.5, "burst": 4.0})  # A new bucket begins with one of the four.
    assert (await infer(caller))["output"] == "olleh"
    began = time.monotonic()
    assert (await infer(caller))["output"] == "olleh"
    waited_s = time.monotonic() - began

    assert (
        0.55 < waited_s < 3.5
    )  # What is left of two seconds, and up to a quarter more; by itself it waits half of one.
    assert counted == ["free"]


async def test_it_does_not_ask_again_where_the_quota_is_used_up(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """x-should-retry: false ends it with the first answer, whose code and wait it hands on."""
    stack.catalog.set(key={"quotas": (("1day", 1),)})
    await infer(caller)
    calls = stack.gateway.admission.calls
    with pytest.raises(openai.RateLimitError) as caught:
        await infer(caller)

    assert (caught.value.code, caught.value.status_code) == ("quota_exceeded", 429)
    assert caught.value.request_id is not None
    assert stack.gateway.admission.calls == calls + 1


async def test_lowered_limits_are_waited_for_as_well(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """A 503 with a wait is retried like a 429; capacity that returns in time lets it in."""
    stack.catalog.set(key={"requests_per_second": 40.0, "burst": 40.0})
    stack.gateway.limits.factor = lambda tier: 0.05  # type: ignore[method-assign]
    outputs = [(await infer(caller))["output"] for _ in range(3)]  # Two in the bucket at most, then two a second.

    assert outputs == ["olleh"] * 3
