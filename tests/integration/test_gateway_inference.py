"""`POST /v1/inference` and its two other formats against a real Redis: responses, errors, audit records and idempotency."""

import asyncio
import time
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.api.open_inference.endpoints import INFER
from gateway.limits.capacity import LiveLimits
from gateway.wiring import API_FORMATS
from integration.gateway_fixtures import Stack, accepted, lower, model, running_stack, stack
from ledger.catalog.api_key import mint
from scheduler.protocol.audit_records import AcceptedRecord, decode_entry
from scheduler.protocol.batches import Outcome
from scheduler.redis_client.keys import Keys

__all__ = ["stack"]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
FORMATS: list[tuple[str, dict[str, str], list[str]]] = [
    ("/v1/predict", {"model_id": "tiny", "input_data": "hello"}, ["request_id", "output", "latency_ms"]),
    ("/api/inference", {"input": "hello"}, ["output", "request_id", "latency_ms"]),
]
KEY = {"Idempotency-Key": '"order-77"'}
BODY = {"input": "hello", "parameters": {"seed": 1, "top": 2}}


def code_of(document: dict[str, Any]) -> str:
    return str(document["error"]["code"])


async def post(stack: Stack, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    async with stack.http.post(stack.url + path, json=body, headers=stack.key() | headers) as response:
        return response.status, await response.json(), lower(response.headers)


async def test_a_response_has_output_and_timings(stack: Stack) -> None:
    """A 200 has the documented members, the request id, Server-Timing and the limit headers."""
    status, document, headers = await stack.infer({"input": "hello", "model": "tiny", "parameters": {"seed": 1}})

    assert status == 200
    metadata = document.pop("metadata")
    assert document == {"request_id": headers["x-request-id"], "output": "olleh"}
    assert metadata["latency_ms"] >= metadata.pop("queue_ms") + metadata["gpu_ms"] - 2
    assert metadata.pop("latency_ms") < 5000
    assert metadata == {
        "tokens_used": 5, "gpu_ms": 1.5, "batch_size": 1, "attempts": 1, "model_version": "v1", "tier": "free",
        "cached": False,
    }  # fmt: skip
    assert headers["server-timing"].startswith("queue;dur=")
    assert headers["x-ratelimit-limit-requests"] == "1000"


@pytest.mark.parametrize(("path", "body", "members"), FORMATS)
async def test_other_formats(stack: Stack, path: str, body: dict[str, str], members: list[str]) -> None:
    """Each format returns its own members and the common headers, also for a replay, whose tokens are not counted again."""
    first = await post(stack, path, body, **{"Idempotency-Key": "k-1"})
    replay = await post(stack, path, body, **{"Idempotency-Key": "k-1"})

    for status, document, headers in (first, replay):
        assert (status, list(document), document["output"]) == (200, members, "olleh")
        assert document["request_id"] == headers["x-request-id"] == first[1]["request_id"]
        assert headers["server-timing"].startswith("queue;dur=")
        assert headers["x-ratelimit-limit-requests"] == "1000"
    assert ("idempotent-replayed" in first[2], replay[2]["idempotent-replayed"]) == (False, "true")
    assert stack.worker.seen == [first[1]["request_id"]]
    async with stack.http.get(f"{stack.url}/metrics") as response:
        (line,) = [
            each
            for each in (await response.text()).splitlines()
            if each.startswith("tierlane_inference_duration_seconds_count")
        ]
    assert line.endswith(" 1.0")


async def test_models_are_resolved_per_format(stack: Stack) -> None:
    """Errors name the field as the format calls it. Without a default model a format without a model field gets 404."""
    for body, status, param in (
        ({"input_data": "a"}, 400, "model_id"),
        ({"model_id": "none", "input_data": "a"}, 404, "model_id"),
        ({"model_id": "m" * 200, "input_data": "a"}, 404, "model_id"),
    ):
        returned, document, _ = await post(stack, "/v1/predict", body)
        assert (returned, document["error"]["param"]) == (status, param)
    stack.catalog.set(models=(model("a"), model("b")))
    status, document, _ = await post(stack, "/api/inference", {"input": "a"})
    assert (status, code_of(document)) == (404, "model_not_found")
    assert stack.worker.seen == []


async def test_concurrent_requests_get_their_own_outputs(stack: Stack) -> None:
    """A hundred concurrent requests share fewer admission calls, and no output is delivered to another request."""
    before = stack.gateway.admission.calls
    texts = [f"text-{index}" for index in range(100)]
    responses = await asyncio.gather(*(stack.infer({"input": text}) for text in texts))

    assert [document["output"] for _, document, _ in responses] == [text[::-1] for text in texts]
    assert stack.gateway.admission.calls - before < 60
    assert len(stack.gateway.pending_requests) == 0


@pytest.mark.parametrize(
    ("body", "headers", "status", "code", "param"),
    [
        (b'{"input":1}', {}, 400, "invalid_request", "input"),
        (b'{"input":"a","model":"none"}', {}, 404, "model_not_found", "model"),
        (b'{"input":"a"}', {"Content-Type": "text/plain"}, 415, "unsupported_media_type", "Content-Type"),
        (b'{"input":"a"}', {"Content-Encoding": "br"}, 415, "unsupported_encoding", "Content-Encoding"),
        (b'{"input":"a"}', {"Authorization": "Bearer nonsense"}, 401, "invalid_api_key", None),
        (b'{"input":"a"}', {"Authorization": "Basic abc"}, 401, "invalid_api_key", None),
    ],
)
async def test_invalid_requests_are_not_admitted(
    stack: Stack, body: bytes, headers: dict[str, str], status: int, code: str, param: str | None
) -> None:
    """A 4xx has code, field and request id; limit headers are sent to authenticated clients only."""
    returned, document, sent = await stack.infer(body, **headers)

    error = document["error"]
    assert (returned, error["code"], error["param"]) == (status, code, param)
    assert sent["x-request-id"] == error["request_id"]
    assert ("x-ratelimit-limit-requests" in sent) == ("ratelimit" in sent) == (status != 401)
    assert (sent.get("www-authenticate") == "Bearer") == (status == 401)
    assert stack.gateway.admission.calls == 0


async def test_rejected_keys(stack: Stack) -> None:
    """A revoked key gets 401, a suspended account 403, a key unknown to a stale catalog 503; valid keys still work."""
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


async def test_no_healthy_worker(client: Redis, redis_url: str) -> None:
    """Two seconds after the last worker went down, requests get 503 at once and health is down."""
    async with running_stack(client, redis_url, worker=False) as stack:
        await stack.worker.heartbeat(status="down")
        await eventually(lambda: stack.gateway.limits.no_gpu(time.monotonic()), "no GPU for two seconds", 5.0)
        status, document, headers = await stack.infer()
        assert (status, code_of(document), "x-ratelimit-limit-requests" in headers) == (503, "no_capacity", True)
        status, health = await stack.internal("/internal/health")
        assert (status, health["status"], health["healthy_gpus"], health["total_gpus"]) == (503, "down", 0, 1)


async def test_a_model_that_is_too_slow(client: Redis, redis_url: str) -> None:
    """Once all workers report it, waiting requests end, streams too, and new ones are rejected; none waits for its deadline."""
    async with running_stack(client, redis_url, worker=False) as stack:
        waiting = [asyncio.create_task(stack.infer({"input": "a"})) for _ in range(2)]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": True}
        stream = asyncio.create_task(
            stack.http.post(f"{stack.url}/v1/chat/completions", json=chat, headers=stack.key())
        )
        await accepted(stack, 3)
        began = time.monotonic()
        await stack.worker.heartbeat(status="slow")
        ended = [*await asyncio.gather(*waiting), await stack.infer()]
        events = await (await stream).text()

    assert time.monotonic() - began < 1.5
    assert [(status, code_of(document)) for status, document, _ in ended] == [(503, "model_too_slow")] * 3
    assert {headers["x-should-retry"] for _, _, headers in ended} == {"false"}
    assert '"model_too_slow"' in events
    states = [
        await client.hmget(Keys().request(each["error"]["request_id"]), "state", "code") for _, each, _ in ended[:2]
    ]
    assert states == [[b"failed", b"model_too_slow"]] * 2


@pytest.mark.parametrize(
    ("stored", "status", "retry"),
    [
        ("poison_request", 422, "false"),
        ("worker_lost", 503, None),
        ("gpu_timeout", 504, "false"),
        ("queue_timeout", 504, "false"),
        ("invalid_output", 502, None),
        ("of_a_newer_version", 500, None),
    ],
)
async def test_stored_error_codes(stack: Stack, stored: str, status: int, retry: str | None) -> None:
    """The error code stored for a failed request decides status and x-should-retry; an unknown code is a 500."""
    stack.worker.answerer = lambda member: Outcome(member.id, stored, 1.0, 0, "v1", "")
    returned, document, headers = await stack.infer()

    code = stored if status != 500 else "internal_error"
    assert (returned, code_of(document), headers.get("x-should-retry")) == (status, code, retry)
    assert "x-ratelimit-limit-requests" in headers


async def test_the_audit_record_names_the_sender(stack: Stack) -> None:
    """The accepted record has customer, key, tier, model, gateway and trace of the request."""
    await stack.infer({"input": "a"}, "paid", traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
    entries = await stack.redis.lrange(Keys().outbox, 0, -1)
    records = [record for entry in entries for record in decode_entry(entry)[0] if isinstance(record, AcceptedRecord)]

    assert [(r.customer_id, r.api_key_id, r.tier, r.model, r.gateway_id, r.trace_id) for r in records] == [
        ("customer-paid", stack.catalog.keys["paid"].id, "paid", "tiny", "g1", TRACE)
    ]


async def test_the_audit_record_names_the_endpoint(stack: Stack) -> None:
    """The name that metrics use, whether the request is on the fast path or not."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/inference": {"input": "a"},
        "/v1/predict": {"model_id": "tiny", "input_data": "a"},
        "/api/inference": {"input": "a"},
        "/v1/completions": {"model": "tiny", "prompt": "a"},
        "/v1/chat/completions": chat,
        "/v1/embeddings": {"model": "tiny", "input": "a"},
        "/v1/messages": chat,
        "/v1/responses": {"model": "tiny", "input": "a", "store": False},
        INFER: {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]},
    }
    found = {}
    for endpoint, body in (*bodies.items(), *bodies.items()):
        await post(stack, endpoint.replace("{id...}", "tiny"), body)
        entries = await stack.redis.lrange(Keys().outbox, 0, -1)
        records = [record for entry in entries for record in decode_entry(entry)[0]]
        found |= {record.id: record.endpoint for record in records if isinstance(record, AcceptedRecord)}

    assert list(found.values()) == [*bodies, *bodies]
    assert {*API_FORMATS} <= {*bodies}


@pytest.mark.parametrize("more", [{}, {"Idempotency-Key": "k"}])
async def test_flex_requests_keep_the_customers_limits(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, more: dict[str, str]
) -> None:
    """With `service_tier: flex` a request is queued in the last tier. Reduced limits of that tier do not apply to it."""
    monkeypatch.setattr(LiveLimits, "factor", lambda _, tier: 0.01 if tier == "free" else 1.0)
    stack.catalog.set(key={"burst": 40.0, "requests_per_second": 0.001})
    own = await stack.infer({"input": "hello"}, "enterprise")
    flex = await stack.infer({"input": "hello", "service_tier": "flex"}, "enterprise", **more)
    after = await stack.infer({"input": "hello"}, "enterprise")

    assert [response[0] for response in (own, flex, after)] == [200, 200, 200]
    assert flex[1]["metadata"]["tier"] == "free"
    assert [response[2]["x-ratelimit-limit-requests"] for response in (own, flex, after)] == ["40"] * 3
    assert [response[2]["x-ratelimit-remaining-requests"] for response in (own, flex, after)] == ["9", "8", "7"]


async def audited(stack: Stack) -> list[str]:
    """Return the ids that have an accepted record."""
    entries = await stack.redis.lrange(Keys().outbox, 0, -1)
    records = [record for entry in reversed(entries) for record in decode_entry(entry)[0]]
    return [record.id for record in records if isinstance(record, AcceptedRecord)]


async def test_replay_and_conflicts(stack: Stack) -> None:
    """While the first request runs, its repetition gets 409; then it is a replay with the first id, without a second run
    or audit row. The bare key and another JSON layout are equal; another body under the key gets 422.
    """
    stack.worker.hold = True
    task = asyncio.create_task(stack.infer(BODY, **KEY))
    await accepted(stack)
    status, document, headers = await stack.infer(BODY, **KEY)
    assert (status, code_of(document), int(headers["retry-after-ms"]) >= 500) == (409, "idempotency_in_progress", True)
    assert (headers["retry-after"], headers["x-should-retry"]) == ("1", "true")
    stack.worker.hold = False
    first = await task
    status, document, headers = await stack.infer({"input": "other"}, **KEY)
    assert (status, code_of(document), headers["x-should-retry"]) == (422, "idempotency_key_reused", "false")

    layout = b'{ "parameters": {"top": 2, "seed": 1}, "input": "hello" }'
    replay = await stack.infer(layout, **{"Idempotency-Key": "order-77"})

    assert (first[0], replay[0]) == (200, 200)
    assert replay[1]["output"] == first[1]["output"] == "olleh"
    assert replay[1]["request_id"] == replay[2]["x-request-id"] == first[1]["request_id"]
    assert (replay[2]["idempotent-replayed"], "idempotent-replayed" in first[2]) == ("true", False)
    assert "x-ratelimit-remaining-requests" in replay[2]
    assert replay[1]["metadata"]["attempts"] == 1
    assert len(stack.worker.seen) == 1
    assert await audited(stack) == [first[1]["request_id"]]


async def test_concurrent_requests_with_one_key_run_once(stack: Stack) -> None:
    """Each of fifty concurrent requests is the run, a replay of it, or gets 409."""
    responses = await asyncio.gather(*(stack.infer(BODY, **KEY) for _ in range(50)))

    assert {status for status, _, _ in responses} <= {200, 409}
    assert len({document["request_id"] for status, document, _ in responses if status == 200}) == 1
    assert len(stack.worker.seen) == 1


async def test_failures_caused_by_the_input_are_replayed(stack: Stack) -> None:
    """The replay has the error, message and request id of the first response; the input does not run again."""
    stack.worker.answerer = lambda member: Outcome(member.id, "invalid_request", 1.0, 0, "v1", "`seed` is wrong.")
    first = await stack.infer(BODY, **KEY)
    replay = await stack.infer(BODY, **KEY)

    assert (first[0], replay[0], code_of(replay[1])) == (400, 400, "invalid_request")
    assert replay[1] == first[1]
    assert replay[2]["x-request-id"] == first[2]["x-request-id"] == first[1]["error"]["request_id"]
    assert replay[2]["idempotent-replayed"] == "true"
    assert len(stack.worker.seen) == 1


async def test_a_key_survives_the_loss_of_redis(client: Redis, redis_url: str) -> None:
    """A request submitted again after the loss takes its key along: a repetition gets 409, then the one response."""
    async with running_stack(client, redis_url, worker=False) as stack:
        task = asyncio.create_task(stack.infer(BODY, **KEY))
        await accepted(stack)
        await client.flushall()
        await stack.worker.heartbeat()
        await eventually(lambda: stack.gateway.recovery.submitted_again == 1, "it is submitted again", 2.0)
        assert code_of((await stack.infer(BODY, **KEY))[1]) == "idempotency_in_progress"
        await stack.worker.turn()
        first = await task
        replay = await stack.infer(BODY, **KEY)

        assert (first[0], replay[0], replay[1]["request_id"]) == (200, 200, first[1]["request_id"])
        assert len(stack.worker.seen) == 1
