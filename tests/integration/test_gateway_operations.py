"""The operators' endpoints: health, the timeline of a request, liveness, readiness and metrics."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from eventually import eventually
from integration.gateway_fixtures import Stack, accepted, openai_client, reverse, stack
from ledger.audit.queries import RequestRow
from metrics_figures import total, value
from scheduler.protocol.batches import Outcome
from scheduler.request_id import created_at, new_request_id

__all__ = ["stack"]

REQUESTS = "tierlane_requests_total"


async def get(stack: Stack, path: str) -> tuple[int, Any]:
    async with stack.http.get(stack.url + path) as response:
        assert response.headers["x-request-id"].startswith("req_")
        return response.status, await response.json()


async def health_of(stack: Stack, status: str, healthy_gpus: int) -> dict[str, Any]:
    """Wait for this health; return the document."""

    async def reached() -> dict[str, Any] | None:
        _, document = await stack.internal("/internal/health")
        return document if (document["status"], document["healthy_gpus"]) == (status, healthy_gpus) else None

    found = await eventually(reached, f"{healthy_gpus} healthy GPUs and {status}", 8.0)
    assert found is not None
    return found


async def test_internal_endpoints_need_the_service_token(stack: Stack) -> None:
    """Without the token, with a wrong one and with a customer's key the response is a 401."""
    for path in ("/internal/health", "/internal/requests/req_1", "/internal/autoscale"):
        for token in ("wrong", "", stack.catalog.keys["enterprise"].text):
            status, document = await stack.internal(path, token)
            assert (status, document["error"]["code"]) == (401, "invalid_api_key")


async def test_health_follows_the_workers(stack: Stack) -> None:
    """A silent worker is reported within two seconds, and healthy again when it is back."""
    await stack.worker.heartbeat("worker-2")
    await health_of(stack, "healthy", 2)
    document = await health_of(stack, "degraded", 1)
    assert document["total_gpus"] == 2
    (check,) = document["checks"]["gpus:healthy"]
    assert (check["code"], "worker-2" in check["action"]) == ("gpu_lost", True)
    await stack.worker.heartbeat("worker-2")
    document = await health_of(stack, "healthy", 2)
    assert 0 <= document["gpu_utilization"] <= 1
    assert set(document["tiers"]) == {"enterprise", "paid", "free"}


async def test_a_gateway_that_was_suspended_gives_no_verdict_on_redis(stack: Stack) -> None:
    """It waits for a new observation: the last one is as old as its own suspension."""
    heartbeat, watch = stack.gateway.heartbeat, stack.gateway.watch
    heartbeat.observed_at -= 60
    watch._updated_at -= 60

    status, document = await stack.internal("/internal/health")
    assert (status, document["checks"]["redis:look_age"][0]["status"]) == (200, "pass")


async def test_health_follows_the_outcomes_of_requests(stack: Stack) -> None:
    """Three failures are down with their cause; once another tier is served, it is degraded. Bad inputs do not count."""
    stack.worker.answerer = lambda member: Outcome(member.id, "poison_request", 1.0, 0, "v1", "")
    for _ in range(3):
        await stack.infer()
    stack.worker.answerer = lambda member: Outcome(member.id, "gpu_timeout", 1.0, 0, "v1", "")
    for _ in range(3):
        await stack.infer()
    document = await health_of(stack, "down", 1)

    (check,) = document["checks"]["tiers:outcomes"]
    assert (check["code"], "TIERLANE_GPU_TIMEOUT_MS" in document["reasons"][0]) == ("requests_time_out", True)
    assert [document["tiers"][name]["error_ratio_60s"] for name in ("free", "paid")] == [1.0, 0.0]
    async with stack.http.get(f"{stack.url}/internal/runbooks/{Path(check['runbook']).stem}") as response:
        assert (response.status, "TIERLANE_GPU_TIMEOUT_MS" in await response.text()) == (200, True)
    stack.worker.answerer = reverse
    for _ in range(3):
        await stack.infer(tier_name="paid")
    await health_of(stack, "degraded", 1)


async def test_the_timeline_of_a_request(stack: Stack) -> None:
    """A queued request has one event, a completed one three, with times since acceptance."""
    stack.worker.hold = True
    task = asyncio.create_task(stack.infer())
    await accepted(stack)
    (pending,) = stack.gateway.pending_requests.all()
    status, document = await stack.internal(f"/internal/requests/{pending.id}")
    assert (status, document["status"], document["latency_ms"], document["error"]) == (200, "queued", None, None)
    assert [event["event"] for event in document["timeline"]] == ["accepted"]

    stack.worker.hold = False
    await task
    status, document = await stack.internal(f"/internal/requests/{pending.id}")
    assert (document["status"], document["attempts"], document["error"]) == ("completed", 1, None)
    assert [event["event"] for event in document["timeline"]] == ["accepted", "batched", "completed"]
    assert document["timeline"][-1]["after_ms"] == document["latency_ms"]


async def test_the_timeline_from_the_audit(stack: Stack) -> None:
    """A request that Redis no longer has is read from PostgreSQL; an unknown or invalid id gets 404."""
    request_id = new_request_id()
    began = created_at(request_id)
    blank: dict[str, Any] = dict.fromkeys(RequestRow.__struct_fields__)
    row = {"id": request_id, "created_at": began, "status": "failed", "error_code": "queue_timeout", "attempts": 0}
    ended = datetime.fromtimestamp(began.timestamp() + 2.0, tz=UTC)
    times = {"completed_at": ended, "latency_ms": 2000.5, "queue_ms": 1500.0}
    stack.stored[request_id] = RequestRow(**blank | row | times)

    status, document = await stack.internal(f"/internal/requests/{request_id}")

    fields = (document["status"], document["error"], document["latency_ms"])
    assert (status, *fields) == (200, "failed", "queue_timeout", 2000.5)
    assert [(event["event"], event["after_ms"]) for event in document["timeline"]] == [
        ("accepted", 0), ("batched", 1500), ("failed", 2000),
    ]  # fmt: skip
    for unknown in ("req_1", "nonsense", new_request_id()):
        status, document = await stack.internal(f"/internal/requests/{unknown}")
        assert (status, document["error"]["code"]) == (404, "not_found")


async def test_liveness_and_readiness(stack: Stack) -> None:
    """Both need no token. A gateway that drains, or has no catalog, is live but not ready; responses end connections."""
    assert await get(stack, "/livez") == (200, {"status": "ok"})
    assert await get(stack, "/readyz") == (200, {"status": "ready"})
    stack.gateway.drain_state.leaving = True
    assert await get(stack, "/readyz") == (503, {"status": "not ready", "waiting_for": "restart"})
    status, _, headers = await stack.infer()
    assert (status, headers["connection"]) == (200, "close")
    stack.gateway.drain_state.leaving = False
    stack.catalog.snapshot = None
    assert await get(stack, "/readyz") == (503, {"status": "not ready", "waiting_for": "catalog"})
    status, document, _ = await stack.infer()
    assert (status, document["error"]["code"]) == (503, "catalog_unavailable")
    assert await get(stack, "/livez") == (200, {"status": "ok"})


async def scrape(stack: Stack) -> bytes:
    """Read the page without a token."""
    async with stack.http.get(f"{stack.url}/metrics") as response:
        assert (response.status, response.content_type) == (200, "text/plain")
        return await response.read()


async def test_each_request_is_counted_once(stack: Stack) -> None:
    """Requests of the fast path, of the handler, of lists and streams are counted by tier, endpoint and outcome."""
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
    assert total(page, REQUESTS) == sum(counted.values())
    for (tier_name, endpoint, outcome), count in counted.items():
        assert value(page, REQUESTS, tier=tier_name, endpoint=endpoint, outcome=outcome) == count
    assert total(page, "tierlane_request_duration_seconds_count", tier="free") == 3
    assert total(page, "tierlane_queue_wait_seconds_count", tier="free") == 4
    assert total(page, "tierlane_redis_call_seconds_count", op="beat") > 0


async def test_rejected_and_cancelled_requests(stack: Stack) -> None:
    """Rejections are counted by the scope of the limit; disconnected clients as cancelled, on both paths."""
    stack.catalog.set(key={"key_rate": 0.5, "key_burst": 8.0})
    statuses = [(await stack.infer())[0] for _ in range(6)]
    rejected = statuses.count(429)
    page = await scrape(stack)
    assert set(statuses) == {200, 429}
    assert value(page, "tierlane_rate_limited_total", tier="free", scope="key_limit") == rejected
    assert total(page, REQUESTS, tier="free", outcome="rate_limit_exceeded") == rejected

    stack.worker.hold = True
    for headers in ({}, {"Idempotency-Key": "k"}):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await stack.infer(tier_name="paid", **headers)

    async def cancelled() -> bool:
        return total(await scrape(stack), REQUESTS, outcome="cancelled", tier="paid") == 2

    await eventually(cancelled, "two requests are counted as cancelled")
