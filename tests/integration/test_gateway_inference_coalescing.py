"""Request coalescing and cached responses as clients see them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import Stack, model, running_stack

HIT, COLLAPSED = "tierlane; hit", "tierlane; fwd=miss; collapsed"


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway whose model caches responses for a minute, and which knows the version of its worker."""
    async with running_stack(client, redis_url) as stack:
        stack.catalog.set(models=(model(cache_ttl_s=60),))
        await eventually(lambda: stack.gateway.heartbeat.model_version == "v1", "the version is known")
        yield stack


async def test_a_cached_response_is_marked(stack: Stack) -> None:
    """In the body and by Cache-Status, with an id of its own and no GPU time. Idempotency-Keys replay it as it was."""
    _, first, first_headers = await stack.infer()
    status, second, headers = await stack.infer(**{"Idempotency-Key": "k"})
    _, again, again_headers = await stack.infer(**{"Idempotency-Key": "k"})

    assert (status, second["output"], second["metadata"]["tokens_used"]) == (200, "olleh", 5)
    assert (first["metadata"]["cached"], second["metadata"]["cached"]) == (False, True)
    assert ("cache-status" in first_headers, headers["cache-status"]) == (False, HIT)
    assert second["metadata"]["gpu_ms"] == second["metadata"]["queue_ms"] == 0
    assert second["request_id"] == headers["x-request-id"] != first["request_id"]
    assert (again["request_id"], again_headers["idempotent-replayed"]) == (second["request_id"], "true")
    assert stack.worker.seen == [first["request_id"]]
    assert len(stack.gateway.pending_requests) == 0


async def test_concurrent_equal_requests_are_one_run(stack: Stack) -> None:
    """All responses but one are marked as collapsed."""
    stack.worker.hold = True
    pending = [asyncio.create_task(stack.infer()) for _ in range(20)]
    await eventually(lambda: stack.gateway.admission.calls and not stack.gateway.admission.pending, "they are admitted")
    stack.worker.hold = False
    responses = await asyncio.gather(*pending)

    marks = [headers.get("cache-status", "") for _, _, headers in responses]
    assert {status for status, _, _ in responses} == {200}
    assert len(stack.worker.seen) == 1
    assert (marks.count(""), marks.count(COLLAPSED) + marks.count(HIT)) == (1, 19)
    assert len({document["request_id"] for _, document, _ in responses}) == 20


async def test_which_requests_share_a_response(stack: Stack) -> None:
    """Not sampled ones, not those of another customer unless the cache is global, and none without a cache."""

    async def cached(tier_name: str = "free", **parameters: object) -> bool:
        _, document, _ = await stack.infer({"input": "hello", "parameters": parameters}, tier_name=tier_name)
        return bool(document["metadata"]["cached"])

    assert [await cached(temperature=0.7) for _ in range(2)] == [False, False]
    assert [await cached(name) for name in ("free", "free", "paid")] == [False, True, False]
    stack.catalog.set(models=(model(cache_ttl_s=60, cache_scope="global"),))
    assert [await cached(name) for name in ("free", "paid")] == [False, True]
    stack.catalog.set(models=(model(),))
    assert await cached() is False
