"""`service_tier: flex`: served in the last tier, under the key's own limits."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from gateway.limits.capacity import LiveLimits
from integration.gateway_fixtures import Stack, running_stack

FLEX = {"input": "hello", "service_tier": "flex"}


@pytest.fixture
async def stack(client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """A ready gateway whose last tier is lowered to next to nothing."""
    monkeypatch.setattr(LiveLimits, "factor", lambda _, tier: 0.01 if tier == "free" else 1.0)
    async with running_stack(client, redis_url) as running:
        yield running


@pytest.mark.parametrize("more", [{}, {"Idempotency-Key": "k"}])
async def test_flex_leaves_the_own_tier_its_burst(stack: Stack, more: dict[str, str]) -> None:
    """The customer has one bucket; a lowered last tier takes nothing of it but the request, and tells the own limits."""
    stack.catalog.set(key={"burst": 40.0, "requests_per_second": 0.001})
    own = await stack.infer({"input": "hello"}, "enterprise")
    flex = await stack.infer(FLEX, "enterprise", **more)
    after = await stack.infer({"input": "hello"}, "enterprise")

    assert [answer[0] for answer in (own, flex, after)] == [200, 200, 200]
    assert flex[1]["metadata"]["tier"] == "free"
    assert [answer[2]["x-ratelimit-limit-requests"] for answer in (own, flex, after)] == ["40"] * 3
    assert [answer[2]["x-ratelimit-remaining-requests"] for answer in (own, flex, after)] == ["9", "8", "7"]
