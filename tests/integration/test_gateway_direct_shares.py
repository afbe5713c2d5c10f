"""The limits of a customer while Redis stands still: held by this gateway's share, told in the headers, leaking nothing."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis

from direct_parts import endpoints
from eventually import eventually
from integration.direct_mode_fixtures import Outage, direct_stack, outage
from integration.gateway_fixtures import Stack

__all__ = ["outage"]  # pytest finds the fixture by its name here.


async def begun(stack: Stack, outage: Outage) -> None:
    """Redis stops, and requests go past it."""
    outage.begin()
    await stack.infer(tier_name="enterprise")
    assert stack.gateway.direct.active


async def test_tokens_and_quotas_hold_and_are_told(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """What Redis would tell, from here: what is left of each limit on a 200, and which one was it on a 429."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        stack.catalog.set(key={"tokens_per_minute": 400, "quotas": (("1day", 50),), "max_concurrency": 9})
        await begun(stack, outage)
        body = {"input": "abcd", "parameters": {"max_tokens": 39}}  # Estimated at 40 tokens, of 100 to begin with.
        answers = [await stack.infer(body) for _ in range(3)]

        assert [code for code, _, _ in answers] == [200, 200, 429]
        told = answers[0][2]
        assert told["x-ratelimit-limit-tokens"] == "400"
        assert 60 <= int(told["x-ratelimit-remaining-tokens"]) <= 62
        assert '"day";r=49;t=86' in told["ratelimit"]
        assert '"concurrency";r=8' in told["ratelimit"]
        _, document, headers = answers[2]
        assert document["error"]["code"] == "rate_limit_exceeded"
        assert "tokens per minute" in document["error"]["message"]
        assert 1000 < int(headers["retry-after-ms"]) < 10_000
        assert '"day";r=48;t=86' in headers["ratelimit"]


async def test_a_quota_that_is_used_up_says_so(client: Redis, redis_url: str, outage: Outage, tmp_path: Path) -> None:
    """It counts from nothing when direct mode begins, for each customer."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        stack.catalog.set(key={"quotas": (("1day", 3),)})
        await begun(stack, outage)
        answers = [await stack.infer() for _ in range(4)]

        assert [code for code, _, _ in answers] == [200] * 3 + [429]
        _, document, headers = answers[3]
        assert (document["error"]["code"], headers["x-should-retry"]) == ("quota_exceeded", "false")


async def test_concurrency_is_free_again_when_requests_end(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Two at a time: the third is refused while they run, and nobody when they have been answered."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        stack.catalog.set(key={"max_concurrency": 2})
        await begun(stack, outage)
        direct_workers[0].seconds = 0.4
        running = [asyncio.create_task(stack.infer()) for _ in range(2)]
        await eventually(lambda: len(stack.gateway.direct._completion) == 2, "two are under way")
        status, document, headers = await stack.infer()

        assert (status, document["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "concurrency limit" in document["error"]["message"]
        assert '"concurrency";r=0' in headers["ratelimit"]
        assert [(await each)[0] for each in running] == [200, 200]
        direct_workers[0].seconds = 0.0
        assert [(await stack.infer())[0] for _ in range(3)] == [200] * 3


async def test_clients_that_leave_do_not_use_up_their_concurrency(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Sixty came, ten at a time, and hung up while they waited or ran: nothing of them is left, no thread either."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        stack.catalog.set(key={"max_concurrency": 10})
        await begun(stack, outage)
        ends, direct_workers[0].seconds = stack.gateway.direct._completion, 0.1
        threads = threading.active_count()
        for _ in range(6):
            asking = [asyncio.create_task(stack.infer()) for _ in range(10)]
            await eventually(lambda: ends.of_customer("customer-free") == 10, "ten are under way")
            for each in asking:
                each.cancel()
            left: list[Any] = await asyncio.gather(*asking, return_exceptions=True)
            assert {type(each) for each in left} == {asyncio.CancelledError}
            await eventually(lambda: ends.of_customer("customer-free") == 0, "nothing of them is left")
        direct_workers[0].seconds = 0.0

        assert (await stack.infer())[0] == 200
        assert threading.active_count() <= threads
        await eventually(lambda: len(ends) == 0, "everything is noted")


async def test_a_shadow_tier_refuses_nobody_here_either(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Its limits are judged, and everybody is let in."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        stack.catalog.set(key={"requests_per_second": 0.01, "burst": 1.0, "quotas": (("1day", 1),)})
        assert stack.catalog.snapshot is not None
        await begun(stack, outage)
        assert [(await stack.infer())[0] for _ in range(2)] == [200, 429]

        shown = stack.catalog.snapshot
        tiers = tuple(msgspec.structs.replace(row, shadow=True) for row in shown.tiers)
        stack.catalog.snapshot = msgspec.structs.replace(shown, tiers=tiers)
        assert [(await stack.infer())[0] for _ in range(3)] == [200] * 3
