"""Equal requests at a gateway: what their clients see of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import Stack, model, running_stack

HIT, COLLAPSED = "tierlane; hit", "tierlane; fwd=miss; collapsed"


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway whose model keeps answers for a minute, and knows which version its worker runs."""
    async with running_stack(client, redis_url) as stack:
        stack.catalog.set(models=(model(cache_ttl_s=60),))
        await eventually(lambda: stack.gateway.heartbeat.model_version == "v1", "the version is known")
        yield stack


async def test_an_answer_that_was_there_already_says_so(stack: Stack) -> None:
    """In the body and in the header of RFC 9211; it has an id of its own, and no time of the GPU."""
    _, first, headers = await stack.infer()
    status, second, said = await stack.infer()

    assert (status, second["output"], second["metadata"]["tokens_used"]) == (200, "olleh", 5)
    assert (first["metadata"]["cached"], second["metadata"]["cached"]) == (False, True)
    assert ("cache-status" in headers, said["cache-status"]) == (False, HIT)
    assert second["metadata"]["gpu_ms"] == second["metadata"]["queue_ms"] == 0
    assert second["request_id"] == said["x-request-id"] != first["request_id"]
    assert stack.worker.seen == [first["request_id"]]
    assert len(stack.gateway.pending_requests) == 0


async def test_those_under_way_are_one_run(stack: Stack) -> None:
    """All but one say that they were collapsed."""
    stack.worker.hold = True
    asked = [asyncio.create_task(stack.infer()) for _ in range(20)]
    await eventually(lambda: stack.gateway.admission.calls and not stack.gateway.admission.pending, "they are admitted")
    stack.worker.hold = False
    answers = await asyncio.gather(*asked)

    said = [headers.get("cache-status", "") for _, _, headers in answers]
    assert {status for status, _, _ in answers} == {200}
    assert len(stack.worker.seen) == 1
    assert said.count("") == 1
    assert said.count(COLLAPSED) + said.count(HIT) == 19
    assert len({document["request_id"] for _, document, _ in answers}) == 20


@pytest.mark.parametrize("parameters", [{"temperature": 0.7}, {"do_sample": True}])
async def test_what_is_drawn_is_drawn_each_time(stack: Stack, parameters: dict[str, object]) -> None:
    """Nobody gets another one's luck."""
    for _ in range(2):
        _, document, _ = await stack.infer({"input": "hello", "parameters": parameters})
        assert document["metadata"]["cached"] is False

    assert len(stack.worker.seen) == 2


async def test_other_customers_have_their_own(stack: Stack) -> None:
    """Unless the model is for all."""
    await stack.infer(tier_name="free")
    _, document, _ = await stack.infer(tier_name="paid")
    assert document["metadata"]["cached"] is False

    stack.catalog.set(models=(model(cache_ttl_s=60, cache_scope="global"),))
    seen = [(await stack.infer(tier_name=name))[1]["metadata"]["cached"] for name in ("free", "paid")]

    assert seen == [False, True]


async def test_a_model_without_a_time_shares_nothing(stack: Stack) -> None:
    """It is obeyed with the next request after the change."""
    await stack.infer()
    stack.catalog.set(models=(model(),))

    _, document, _ = await stack.infer()

    assert document["metadata"]["cached"] is False
    assert len(stack.worker.seen) == 2


async def test_an_idempotency_key_of_a_kept_answer_is_replayed(stack: Stack) -> None:
    """What is replayed is that one's own answer, with its own id."""
    await stack.infer()
    _, first, _ = await stack.infer(**{"Idempotency-Key": "k"})
    _, again, headers = await stack.infer(**{"Idempotency-Key": "k"})

    assert first["metadata"]["cached"] is True
    assert (again["request_id"], headers["idempotent-replayed"]) == (first["request_id"], "true")
