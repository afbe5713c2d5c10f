"""`POST /v1/inference` against a real Redis: success, every refusal by its row, and what each answer carries."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import TIERS, Stack, running_stack, tier
from ledger.catalog.api_key import mint
from scheduler.protocol.audit_outbox import AcceptedRecord, decode_entry
from scheduler.protocol.batches import Outcome
from scheduler.protocol.cancellation import Terminations
from scheduler.redis_client.keys import Keys


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


def code_of(document: dict[str, Any]) -> str:
    return str(document["error"]["code"])


async def test_the_tier_comes_from_the_key_and_the_first_fresh_bucket_is_spent(stack: Stack) -> None:
    """Each key is answered in its own tier, and a second request finds one token less or refilled."""
    for tier_name in TIERS:
        status, document, _ = await stack.infer(tier_name=tier_name)
        assert (status, document["metadata"]["tier"]) == (200, tier_name)


async def test_many_at_once_get_their_own_outputs(stack: Stack) -> None:
    """No answer is mixed up, and all share far fewer admission calls."""
    before = stack.gateway.admission.calls
    texts = [f"text-{index}" for index in range(100)]
    answers = await asyncio.gather(*(stack.infer({"input": text}) for text in texts))

    assert [document["output"] for _, document, _ in answers] == [text[::-1] for text in texts]
    assert stack.gateway.admission.calls - before < 60
    assert len(stack.gateway.pending_requests) == 0


@pytest.mark.parametrize(
    ("body", "headers", "status", "code", "param"),
    [
        (b'{"input":1}', {}, 400, "invalid_request", "input"),
        (b'{"input":"a","x":1}', {}, 400, "invalid_request", "x"),
        (b'{"input":"a","input":"b"}', {}, 400, "invalid_request", "input"),
        (b'{"input":"a","parameters":{"t":NaN}}', {}, 400, "invalid_request", "t"),
        (b'{"input":"a","parameters":{"t":18446744073709551616}}', {}, 400, "invalid_request", "parameters"),
        (b'{"input":"\xff"}', {}, 400, "invalid_request", None),
        (b'{"input":' + b"[" * 20 + b"]" * 20 + b"}", {}, 400, "invalid_request", "input"),
        (b'{"input":"a","model":"none"}', {}, 404, "model_not_found", "model"),
        (b'{"input":"' + b"x" * 200_000 + b'"}', {}, 413, "request_too_large", "input"),
        (b'{"input":"' + b"x" * 300_000 + b'"}', {}, 413, "request_too_large", None),
        (b'{"input":"a"}', {"Content-Type": "text/plain"}, 415, "unsupported_encoding", "Content-Type"),
        (b'{"input":"a"}', {"Content-Encoding": "gzip"}, 415, "unsupported_encoding", "Content-Encoding"),
        (b'{"input":"a"}', {"Authorization": "Bearer nonsense"}, 401, "invalid_api_key", None),
        (b'{"input":"a"}', {"Authorization": "Basic abc"}, 401, "invalid_api_key", None),
    ],
)
async def test_bad_requests_are_named_and_spend_nothing(
    stack: Stack, body: bytes, headers: dict[str, str], status: int, code: str, param: str | None
) -> None:
    """A 4xx with code, field and request id; admission is never asked."""
    answered, document, sent = await stack.infer(body, **headers)

    error = document["error"]
    assert (answered, error["code"], error["param"]) == (status, code, param)
    assert sent["x-request-id"] == error["request_id"]
    assert stack.gateway.admission.calls == 0
    authenticated = status != 401
    assert ("x-ratelimit-limit-requests" in sent) == ("ratelimit" in sent) == authenticated
    assert (sent.get("www-authenticate") == "Bearer") == (status == 401)


async def test_keys_that_may_not_enter(stack: Stack) -> None:
    """Revoked 401, suspended 403, unknown while the catalog is stale 503."""
    stack.catalog.set(key={"revoked": True})
    status, document, _ = await stack.infer()
    assert (status, code_of(document)) == (401, "invalid_api_key")
    stack.catalog.set(key={"suspended": True})
    status, document, _ = await stack.infer()
    assert (status, code_of(document)) == (403, "account_suspended")
    stack.catalog.set()
    stack.catalog.fresh = False
    status, document, headers = await stack.infer(Authorization=f"Bearer {mint().text}")
    assert (status, code_of(document)) == (503, "catalog_unavailable")
    assert int(headers["retry-after-ms"]) >= 1000
    assert (await stack.infer())[0] == 200


async def test_a_key_over_its_limit_is_told_when_to_return(stack: Stack) -> None:
    """429 with Retry-After in both units and the empty bucket in the headers; nothing is left behind."""
    stack.catalog.set(key={"requests_per_second": 2.0, "burst": 4.0})
    answers = [await stack.infer() for _ in range(3)]
    refused = [answer for answer in answers if answer[0] != 200]

    assert len(refused) >= 1
    status, document, headers = refused[-1]
    assert (status, code_of(document)) == (429, "rate_limit_exceeded")
    wait_ms = document["error"]["retry_after_ms"]
    assert 0 < wait_ms <= 625
    assert (headers["retry-after-ms"], headers["retry-after"]) == (str(wait_ms), "1")
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["ratelimit-policy"].startswith('"requests";q=4;w=2, ')
    assert document["error"]["message"] == "The rate limit of this account, 2 requests/s (burst 4), is reached."


async def test_lowered_limits_are_not_the_clients_fault(stack: Stack) -> None:
    """A key that only the lowered limit stops is told `reduced_capacity`, and headers show the limit in force."""
    stack.catalog.set(key={"requests_per_second": 2.0, "burst": 40.0})
    stack.gateway.limits.factor = lambda tier: 0.05  # type: ignore[method-assign]
    answers = [await stack.infer() for _ in range(4)]

    status, document, headers = answers[-1]
    assert (status, code_of(document)) == (503, "reduced_capacity")
    assert headers["x-ratelimit-limit-requests"] == "2"


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"shed_depth": 2}, "shed_for_priority"), ({"max_queue_depth": 2}, "queue_full")],
)
async def test_a_long_queue_refuses(stack: Stack, changes: dict[str, Any], code: str) -> None:
    """Shed by depth, or a full queue: 503 with a wait; those inside are still answered."""
    stack.worker.hold = True
    stack.catalog.set(tiers=(tier("free", 3, 0.1, **changes),))
    inside = [asyncio.create_task(stack.infer()) for _ in range(2)]
    await eventually(lambda: stack.gateway.admission.calls and len(stack.gateway.pending_requests) == 2, "two wait")
    await eventually(lambda: all(w.verdict for w in stack.gateway.pending_requests.all()), "both are admitted")

    status, document, headers = await stack.infer()

    assert (status, code_of(document)) == (503, code)
    assert "retry-after" in headers
    stack.worker.hold = False
    assert [answer[0] for answer in await asyncio.gather(*inside)] == [200, 200]


async def test_no_gpu_is_said_after_the_waiting_room(client: Redis, redis_url: str) -> None:
    """With every worker gone for two seconds a request is refused at once and health is down."""
    async with running_stack(client, redis_url, worker=False) as stack:
        await stack.worker.heartbeat(status="down")
        await eventually(lambda: stack.gateway.limits.no_gpu(time.monotonic()), "no GPU for two seconds", 5.0)
        status, document, headers = await stack.infer()
        assert (status, code_of(document)) == (503, "no_capacity")
        assert "x-ratelimit-limit-requests" in headers
        status, health = await stack.internal("/internal/health")
        assert (status, health["status"], health["healthy_gpus"], health["total_gpus"]) == (503, "down", 0, 1)


async def test_a_full_redis_is_backpressure(stack: Stack) -> None:
    """At its memory limit Redis takes no request: 429, and everything else goes on."""
    memory = await stack.redis.info("memory")
    await stack.redis.config_set("maxmemory", 1)
    try:
        status, document, headers = await stack.infer()
    finally:
        await stack.redis.config_set("maxmemory", memory["maxmemory"])
    assert (status, code_of(document)) == (429, "backpressure")
    assert "retry-after" in headers
    assert (await stack.infer())[0] == 200


@pytest.mark.parametrize(
    ("stored", "status", "retry"),
    [
        ("poison_request", 422, "false"),
        ("worker_lost", 503, None),
        ("gpu_timeout", 504, "false"),
        ("invalid_output", 502, None),
        ("of_a_newer_version", 500, None),
    ],
)
async def test_failures_of_the_work_have_their_rows(stack: Stack, stored: str, status: int, retry: str | None) -> None:
    """What the worker stored as error code decides status and headers."""
    stack.worker.answerer = lambda member: Outcome(member.id, stored, 1.0, 0, "v1", "")
    answered, document, headers = await stack.infer()

    expected = stored if status != 500 else "internal_error"
    assert (answered, code_of(document), headers.get("x-should-retry")) == (status, expected, retry)
    assert "x-ratelimit-limit-requests" in headers


async def test_a_request_that_waits_too_long_in_its_queue(stack: Stack) -> None:
    """The scheduler ends it, the gateway hears of it at once: 504 queue_timeout."""
    stack.worker.hold = True
    stack.catalog.set(tiers=(tier("free", 3, 0.1, max_queue_ms=50),))
    asking = asyncio.create_task(stack.infer())
    terminations = Terminations(stack.redis, Keys())
    await eventually(lambda: _expired(terminations), "the queue age has passed")
    status, document, headers = await asking

    assert (status, code_of(document), headers["x-should-retry"]) == (504, "queue_timeout", "false")


async def _expired(terminations: Terminations) -> bool:
    ended, _ = await terminations.expire(TIERS)
    return ended == 1


async def test_trace_and_key_reach_the_audit(stack: Stack) -> None:
    """The accepted record names customer, key, tier, model, gateway and trace."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    await stack.infer({"input": "a"}, "paid", traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    entries = await stack.redis.lrange(Keys().outbox, 0, -1)
    records = [record for entry in entries for record in decode_entry(entry)[0] if isinstance(record, AcceptedRecord)]

    assert [(r.customer_id, r.api_key_id, r.tier, r.model, r.gateway_id, r.trace_id) for r in records] == [
        ("customer-paid", stack.catalog.keys["paid"].id, "paid", "tiny", "g1", trace)
    ]
