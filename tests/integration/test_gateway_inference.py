"""`POST /v1/inference` against a real Redis: success, every refusal by its row, and what each answer carries."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from integration.gateway_fixtures import Stack, running_stack


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url) as running:
        yield running


async def test_a_request_gets_its_output_and_where_the_time_went(stack: Stack) -> None:
    """200 has the body of the contract, the request id, Server-Timing and the limit's state."""
    status, document, headers = await stack.infer({"input": "hello", "model": "tiny", "parameters": {"seed": 1}})

    assert status == 200
    metadata = document.pop("metadata")
    assert document == {"request_id": headers["x-request-id"], "output": "olleh"}
    assert set(metadata) == {
        "tokens_used", "latency_ms", "queue_ms", "gpu_ms", "batch_size", "attempts", "model_version", "tier", "cached",
    }  # fmt: skip
    assert (metadata["tokens_used"], metadata["gpu_ms"], metadata["batch_size"], metadata["attempts"]) == (5, 1.5, 1, 1)
    assert (metadata["model_version"], metadata["tier"], metadata["cached"]) == ("v1", "free", False)
    assert metadata["latency_ms"] >= metadata["queue_ms"] + metadata["gpu_ms"] - 2
    assert headers["server-timing"].startswith("queue;dur=")
    assert headers["x-ratelimit-limit-requests"] == "1000"
