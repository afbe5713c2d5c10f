"""`GET /metrics` at running gateways: how calls end is counted once, and several gateways of a host tell one sum."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import LiteralCatalog, Stack, openai_client, running_stack
from metrics_figures import total, value


@pytest.fixture
async def stack(client: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url, metrics_dir=tmp_path / "metrics") as running:
        yield running


async def scrape(stack: Stack) -> bytes:
    """The page, without a token."""
    async with stack.http.get(f"{stack.url}/metrics") as answer:
        assert answer.status == 200
        assert answer.content_type == "text/plain"
        return await answer.read()


async def ended(stack: Stack, **labels: str) -> float:
    return total(await scrape(stack), "tierlane_requests_total", **labels)


async def test_each_call_is_counted_once_by_how_it_ended(stack: Stack) -> None:
    """On the fast lane and beside it: completed, refused for its body, of nobody, at other doors, streamed."""
    await stack.infer()
    await stack.infer({"input": "x"}, "paid", **{"Idempotency-Key": "k"})
    await stack.infer({"input": "x"}, "paid", **{"Idempotency-Key": "k"})
    await stack.infer({"nonsense": 1})
    await stack.infer(Authorization="Bearer tl_nobody")
    await stack.infer(Authorization="Bearer tl_nobody", **{"Idempotency-Key": "k"})
    async with openai_client(stack) as client:
        await client.completions.create(model="tiny", prompt=["a", "b"])
        async for _ in await client.completions.create(model="tiny", prompt="a", stream=True):
            pass

    page = await scrape(stack)
    counted = {
        ("free", "/v1/inference", "completed"): 1,
        ("paid", "/v1/inference", "completed"): 2,
        ("free", "/v1/inference", "invalid_request"): 1,
        ("unknown", "/v1/inference", "invalid_api_key"): 2,
        ("free", "/v1/completions", "completed"): 2,
    }
    name = "tierlane_requests_total"
    assert total(page, name) == sum(counted.values())
    for (tier_name, endpoint, outcome), count in counted.items():
        assert value(page, name, tier=tier_name, endpoint=endpoint, outcome=outcome) == count
    assert total(page, "tierlane_request_duration_seconds_count", tier="free") == 3
    assert total(page, "tierlane_queue_wait_seconds_count", tier="free") == 4


async def test_refusals_say_why(stack: Stack) -> None:
    """A limit of the customer's own, by its scope."""
    stack.catalog.set(key={"key_rate": 0.5, "key_burst": 8.0})
    statuses = [(await stack.infer())[0] for _ in range(6)]
    refused = statuses.count(429)

    page = await scrape(stack)
    assert set(statuses) == {200, 429}
    assert value(page, "tierlane_rate_limited_total", tier="free", scope="key_limit") == refused
    assert await ended(stack, tier="free", outcome="rate_limit_exceeded") == refused


async def test_a_client_that_leaves_is_counted(stack: Stack) -> None:
    """On either lane, as cancelled."""
    stack.worker.hold = True
    for headers in ({}, {"Idempotency-Key": "k"}):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await stack.infer(**headers)

    async def cancelled() -> bool:
        return await ended(stack, outcome="cancelled", tier="free") == 2

    await eventually(cancelled, "two calls counted as cancelled")


async def test_what_the_gateway_sees_is_told(stack: Stack) -> None:
    """Queues, workers, capacity, and that its directory is usable."""

    async def page_with_workers() -> bytes:
        page = await scrape(stack)
        return page if value(page, "tierlane_gpu_healthy", pool="default", gpu="worker-1") == 1 else b""

    page = await eventually(page_with_workers, "a page with a healthy worker")
    assert value(page, "tierlane_queue_depth", pool="default", tier="free") == 0
    assert (value(page, "tierlane_capacity_requests_per_second", pool="default") or 0) > 0
    assert value(page, "tierlane_metrics_directory_usable") == 1
    assert value(page, "tierlane_metrics_processes") == 1
    assert total(page, "tierlane_redis_call_seconds_count", op="beat") > 0


async def test_two_gateways_tell_one_sum(client: Redis, redis_url: str, tmp_path: Path) -> None:
    """Whichever is asked, at once and in turns: each call is seen, and no scrape says less than the one before it."""
    catalog = LiteralCatalog()
    async with (
        running_stack(client, redis_url, catalog=catalog, metrics_dir=tmp_path) as one,
        running_stack(client, redis_url, catalog=catalog, metrics_dir=tmp_path, gateway_id="g2", worker=False) as two,
    ):
        seen = 0.0
        for number in range(1, 11):
            await (one, two)[number % 2].infer()
            for asked in (one, two):
                now = await ended(asked)
                assert now >= seen
                seen = now

        async def all_told() -> bool:
            return await ended(one) == await ended(two) == 10

        await eventually(all_told, "both gateways tell ten calls")
        assert value(await scrape(two), "tierlane_metrics_processes") == 2


async def test_what_a_gateway_counted_survives_it(client: Redis, redis_url: str, tmp_path: Path) -> None:
    """One that was stopped, and one that is new: the sum goes on."""
    for number in range(1, 4):
        async with running_stack(client, redis_url, metrics_dir=tmp_path, gateway_id=f"g{number}") as stack:
            await stack.infer()
            assert await ended(stack) == number


async def test_without_its_directory_a_gateway_tells_its_own(
    client: Redis, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It serves, says in a gauge that the sum is not whole, and in the log once why."""
    (tmp_path / "file").write_text("")
    async with running_stack(client, redis_url, metrics_dir=tmp_path / "file") as stack:
        await stack.infer()
        pages = [await scrape(stack) for _ in range(3)]

    assert [total(page, "tierlane_requests_total") for page in pages] == [1, 1, 1]
    assert value(pages[0], "tierlane_metrics_directory_usable") == 0
    assert capsys.readouterr().out.count("shared metrics directory not usable") == 1
