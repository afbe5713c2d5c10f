"""What operators ask: health, one request's story, liveness and readiness."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import Stack, running_stack
from ledger.audit.queries import RequestRow
from scheduler.request_id import created_at, new_request_id


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url) as running:
        yield running


@pytest.mark.parametrize("path", ["/internal/health", "/internal/requests/req_1", "/internal/autoscale"])
@pytest.mark.parametrize("token", ["wrong", ""])
async def test_internal_pages_need_the_service_token(stack: Stack, path: str, token: str) -> None:
    """Not even a customer's key will do."""
    for presented in (token, stack.catalog.keys["enterprise"].text):
        status, document = await stack.internal(path, presented)
        assert (status, document["error"]["code"]) == (401, "invalid_api_key")


async def test_health_shows_the_truth(stack: Stack) -> None:
    """All well at first; a worker that falls silent is named within two seconds, and again healthy when it is back."""
    await stack.worker.heartbeat("worker-2")
    await _until_health(stack, "healthy", 2)
    document = await _until_health(stack, "degraded", 1)
    assert document["total_gpus"] == 2
    assert document["reasons"][0].startswith("1 of 2 GPUs is not healthy: worker-2 was last seen 1.")
    await stack.worker.heartbeat("worker-2")
    document = await _until_health(stack, "healthy", 2)
    assert 0 <= document["gpu_utilization"] <= 1
    assert set(document["tiers"]) == {"enterprise", "paid", "free"}


async def test_the_size_of_the_pool_is_advised(stack: Stack) -> None:
    """Healthy workers, how many there should be, why, and from what; one that comes is counted within two seconds."""
    await stack.worker.heartbeat("worker-2")

    async def counted() -> dict[str, Any] | None:
        status, document = await stack.internal("/internal/autoscale")
        assert status == 200
        return document if document["current_workers"] == 2 else None

    document = await eventually(counted, "two workers", 3.0)
    assert document is not None
    assert document["recommended_workers"] == 2
    assert document["reason"].startswith("no change needed: ")
    assert set(document["inputs"]["backlog"]) == {"enterprise", "paid", "free"}
    assert document["pools"].keys() == {"default"}


async def _until_health(stack: Stack, status: str, healthy_gpus: int) -> dict[str, Any]:
    async def reached() -> dict[str, Any] | None:
        _, document = await stack.internal("/internal/health")
        return document if (document["status"], document["healthy_gpus"]) == (status, healthy_gpus) else None

    found = await eventually(reached, f"{healthy_gpus} healthy GPUs and {status}", 3.0)
    assert found is not None
    return found


async def test_health_counts_requests_and_queues(stack: Stack) -> None:
    """Rate, depth and p95 come from the gateway's own beats and the queues."""
    for _ in range(10):
        await stack.infer()
    stack.worker.hold = True
    asking = [asyncio.create_task(stack.infer()) for _ in range(3)]

    async def shown() -> bool:
        _, document = await stack.internal("/internal/health")
        free = document["tiers"]["free"]
        return bool(
            document["queue_depth"] == free["depth"] == 3 and document["requests_per_second"] and free["p95_ms"]
        )

    await eventually(shown, "health shows three waiting, a rate and a p95", 3.0)
    stack.worker.hold = False
    await asyncio.gather(*asking)


async def test_a_requests_story_is_told_from_redis(stack: Stack) -> None:
    """Queued with one event, completed with three; times are counted from acceptance."""
    stack.worker.hold = True
    asking = asyncio.create_task(stack.infer())
    await eventually(lambda: [w for w in stack.gateway.pending_requests.all() if w.verdict], "it is admitted")
    (waiting,) = stack.gateway.pending_requests.all()
    status, document = await stack.internal(f"/internal/requests/{waiting.id}")
    assert (status, document["status"], document["latency_ms"], document["error"]) == (200, "queued", None, None)
    assert [event["event"] for event in document["timeline"]] == ["accepted"]

    stack.worker.hold = False
    await asking
    status, document = await stack.internal(f"/internal/requests/{waiting.id}")
    assert (document["status"], document["attempts"], document["error"]) == ("completed", 1, None)
    assert [event["event"] for event in document["timeline"]] == ["accepted", "batched", "completed"]
    assert document["timeline"][-1]["after_ms"] == document["latency_ms"]


async def test_an_old_requests_story_is_told_from_the_audit(stack: Stack) -> None:
    """What Redis has forgotten PostgreSQL still knows, in the same form."""
    request_id = new_request_id()
    began = created_at(request_id)
    ended = datetime.fromtimestamp(began.timestamp() + 2.0, tz=UTC)
    blank: dict[str, Any] = dict.fromkeys(RequestRow.__struct_fields__)
    row = {"id": request_id, "created_at": began, "status": "failed", "error_code": "queue_timeout"}
    known = {"completed_at": ended, "latency_ms": 2000.5, "queue_ms": 1500.0, "attempts": 0}
    stack.stored[request_id] = RequestRow(**blank | row | known)

    status, document = await stack.internal(f"/internal/requests/{request_id}")

    assert (status, document["status"], document["error"], document["latency_ms"]) == (
        200, "failed", "queue_timeout", 2000.5,
    )  # fmt: skip
    assert [(event["event"], event["after_ms"]) for event in document["timeline"]] == [
        ("accepted", 0), ("batched", 1500), ("failed", 2000),
    ]  # fmt: skip


@pytest.mark.parametrize("request_id", ["req_1", "nonsense", "req_" + "0" * 32])
async def test_an_unknown_request_is_not_found(stack: Stack, request_id: str) -> None:
    """Whether it is an id or not."""
    for each in (request_id, new_request_id()):
        status, document = await stack.internal(f"/internal/requests/{each}")
        assert (status, document["error"]["code"]) == (404, "not_found")


async def test_liveness_and_readiness_need_no_token_and_say_no_secret(stack: Stack) -> None:
    """Live is the loop alone; ready wants a catalog, and not to be leaving."""
    assert await _get(stack, "/livez") == (200, {"status": "ok"})
    assert await _get(stack, "/readyz") == (200, {"status": "ready"})
    stack.gateway.drain_state.leaving = True
    assert await _get(stack, "/readyz") == (503, {"status": "not ready", "waiting_for": "restart"})
    stack.gateway.drain_state.leaving = False
    stack.catalog.snapshot = None
    assert await _get(stack, "/readyz") == (503, {"status": "not ready", "waiting_for": "catalog"})
    status, document, _ = await stack.infer()
    assert (status, document["error"]["code"]) == (503, "catalog_unavailable")


async def _get(stack: Stack, path: str) -> tuple[int, Any]:
    async with stack.http.get(stack.url + path) as answer:
        assert answer.headers["x-request-id"].startswith("req_")
        return answer.status, await answer.json()
