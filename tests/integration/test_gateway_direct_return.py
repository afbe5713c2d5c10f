"""The way back from direct mode: Redis is trusted only after a while, and what cannot do without it goes there earlier."""

import asyncio
import time
from pathlib import Path

from redis.asyncio import Redis

from direct_parts import endpoints
from eventually import eventually
from integration.direct_mode_fixtures import Outage, back, direct_already, direct_stack, outage, served

__all__ = ["outage"]  # pytest finds the fixture by its name here.


async def test_a_redis_that_comes_and_goes_does_not_change_the_way(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Back for less than the time of trust: requests stay on their way, and are answered without a pause."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        stack.gateway.direct._policy._leave_after_s = 2.0
        outage.begin()
        assert (await stack.infer(tier_name="enterprise"))[0] == 200
        for _ in range(2):
            outage.end()
            await eventually(lambda: stack.gateway.watch.breaker.well, "Redis answers")
            outage.begin()
            began = time.monotonic()
            assert (await stack.infer(tier_name="enterprise"))[0] == 200
            assert time.monotonic() - began < 0.2
            await eventually(lambda: not stack.gateway.watch.answers, "Redis is away again")
            assert stack.gateway.direct.active
        outage.end()
        await back(stack)
        assert not stack.gateway.direct._connections.breakers()  # Nobody is called any more.


async def test_a_key_needs_redis_and_gets_it_as_soon_as_it_answers(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Refused while Redis is away; served through Redis while the others still go past it."""
    async with direct_already(client, redis_url, tmp_path, outage) as (stack, _):
        stack.gateway.direct._policy._leave_after_s = 30.0
        status, document, _ = await stack.infer(tier_name="enterprise", **{"Idempotency-Key": "k"})
        assert (status, document["error"]["code"]) == (503, "no_capacity")
        outage.end()
        await eventually(lambda: stack.gateway.watch.answers, "Redis answers")
        asking = asyncio.create_task(stack.infer(tier_name="enterprise", **{"Idempotency-Key": "k"}))
        await eventually(lambda: served(stack, asking), "it is served through Redis")
        assert ((await asking)[0], stack.gateway.direct.active) == (200, True)
        assert (await stack.infer(tier_name="enterprise"))[0] == 200


async def test_what_went_to_redis_before_it_was_trusted_is_taken_over_too(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """It came back, accepted a request with a key, and went away again, all while direct mode was on."""
    async with direct_already(client, redis_url, tmp_path, outage) as (stack, _):
        stack.gateway.direct._policy._leave_after_s = 30.0
        outage.end()
        await eventually(lambda: stack.gateway.watch.answers, "Redis answers")
        asking = asyncio.create_task(stack.infer({"input": "abc"}, "paid", **{"Idempotency-Key": "k"}))
        await eventually(lambda: [w.accepted for w in stack.gateway.pending_requests.all()] == [True], "it is accepted")
        outage.begin()
        status, document, _ = await asking
        assert (status, document["output"]) == (200, "cba")
        assert document["metadata"]["latency_ms"] < 1500
