"""`POST /v1/predict`, `POST /api/inference` and `GET /v1/models`: other forms, and behind them the same handler."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from integration.gateway_fixtures import Stack, model, openai_client, running_stack

Told = tuple[int, dict[str, Any], dict[str, str]]


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url) as running:
        yield running


async def post(stack: Stack, path: str, body: Any, **headers: str) -> Told:
    """POST `body`, bytes or what becomes JSON, with the free customer's key."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **stack.key(), **headers}
    async with stack.http.post(stack.url + path, data=raw, headers=sent) as answer:
        return answer.status, await answer.json(), {name.lower(): value for name, value in answer.headers.items()}


async def get(stack: Stack, path: str, headers: dict[str, str] | None = None) -> Told:
    async with stack.http.get(stack.url + path, headers=stack.key() if headers is None else headers) as answer:
        return answer.status, await answer.json(), {name.lower(): value for name, value in answer.headers.items()}


@pytest.mark.parametrize(
    ("path", "body", "members"),
    [
        ("/v1/predict", {"model_id": "tiny", "input_data": "hello"}, ["request_id", "output", "latency_ms"]),
        ("/api/inference", {"input": "hello"}, ["output", "request_id", "latency_ms"]),
    ],
)
async def test_each_door_answers_in_its_own_form(
    stack: Stack, path: str, body: dict[str, str], members: list[str]
) -> None:
    """A 200 with the members of the contract, and the same headers as everywhere."""
    status, document, headers = await post(stack, path, body)

    assert (status, list(document)) == (200, members)
    assert document["output"] == "olleh"
    assert document["request_id"] == headers["x-request-id"]
    assert document["latency_ms"] > 0
    assert headers["server-timing"].startswith("queue;dur=")
    assert headers["x-ratelimit-limit-requests"] == "1000"
    assert stack.worker.seen == [document["request_id"]]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/predict", {"input_data": "a"}, 400, "invalid_request", "model_id"),
        ("/v1/predict", {"model_id": "tiny"}, 400, "invalid_request", "input_data"),
        ("/v1/predict", {"model_id": "tiny", "input_data": ""}, 400, "invalid_request", "input_data"),
        ("/v1/predict", {"model_id": "tiny", "input": "a"}, 400, "invalid_request", "input"),
        ("/v1/predict", {"model_id": "none", "input_data": "a"}, 404, "model_not_found", "model_id"),
        ("/v1/predict", {"model_id": "m" * 200, "input_data": "a"}, 404, "model_not_found", "model_id"),
        ("/v1/predict", {"model_id": "tiny", "input_data": "x" * 200_000}, 413, "request_too_large", "input_data"),
        (
            "/v1/predict",
            b'{"model_id":"tiny","input_data":"a","input_data":"b"}',
            400,
            "invalid_request",
            "input_data",
        ),
        ("/api/inference", {"input": "a", "model": "tiny"}, 400, "invalid_request", "model"),
        ("/api/inference", b'{"input":"a","input":"b"}', 400, "invalid_request", "input"),
        ("/api/inference", b"[]", 400, "invalid_request", None),
        ("/api/inference", b"\xff", 400, "invalid_request", None),
    ],
)
async def test_bad_bodies_are_refused_with_the_door_s_own_names(
    stack: Stack, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    """The error names the field as the client wrote it, and nothing reaches a worker."""
    got, document, _ = await post(stack, path, body)

    assert (got, document["error"]["code"], document["error"]["param"]) == (status, code, param)
    assert stack.worker.seen == []


async def test_without_a_default_model_the_plain_door_says_so(stack: Stack) -> None:
    """Two models and no default: a client that cannot name one is told, instead of getting either."""
    stack.catalog.set(models=(model("a"), model("b")))

    status, document, _ = await post(stack, "/api/inference", {"input": "a"})

    assert (status, document["error"]["code"]) == (404, "model_not_found")


async def test_all_doors_spend_the_same_limits(stack: Stack) -> None:
    """A customer whose bucket is empty is refused at every door."""
    stack.catalog.set(key={"requests_per_second": 0.01, "burst": 4.0})  # A new bucket begins with one of the four.
    assert (await post(stack, "/v1/predict", {"model_id": "tiny", "input_data": "a"}))[0] == 200

    for path, body in (("/api/inference", {"input": "a"}), ("/v1/predict", {"model_id": "tiny", "input_data": "a"})):
        status, document, headers = await post(stack, path, body)
        assert (status, document["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "retry-after" in headers
    assert (await stack.infer())[0] == 429


async def test_a_key_sent_again_is_replayed_in_the_door_s_own_form(stack: Stack) -> None:
    """The model runs once; the second answer has the first one's id and output, and says what it is."""
    body = {"model_id": "tiny", "input_data": "hello"}
    first = await post(stack, "/v1/predict", body, **{"Idempotency-Key": "k-1"})
    again = await post(stack, "/v1/predict", body, **{"Idempotency-Key": "k-1"})

    assert (first[0], again[0]) == (200, 200)
    assert (again[1]["request_id"], again[1]["output"]) == (first[1]["request_id"], "olleh")
    assert again[2]["idempotent-replayed"] == "true"
    assert len(stack.worker.seen) == 1


async def test_models_are_listed_as_openai_s_client_expects(stack: Stack) -> None:
    """Enabled models of this pool, by name; one of them by its id, slashes included."""
    others = (model("off", enabled=False), model("away", pool="other"))
    stack.catalog.set(models=(model("tiny"), model("org/large:v2"), *others))
    async with openai_client(stack) as caller:
        listed = [each async for each in caller.models.list()]
        one = await caller.models.retrieve("org/large:v2")
        with pytest.raises(openai.NotFoundError) as caught:
            await caller.models.retrieve("off")

    assert [each.id for each in listed] == ["org/large:v2", "tiny"]
    assert {each.object for each in listed} == {"model"}
    assert (one.id, one.owned_by) == ("org/large:v2", "tierlane")
    assert one.created > 1_700_000_000
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_models_are_told_to_customers_only_and_cost_nothing(stack: Stack) -> None:
    """Without a key 401; with one the state of the limits comes along, and none of it is spent."""
    calls = stack.gateway.admission.calls

    assert (await get(stack, "/v1/models", {}))[0] == 401
    assert (await get(stack, "/v1/models/tiny", {}))[0] == 401
    status, document, headers = await get(stack, "/v1/models")
    assert (status, [each["id"] for each in document["data"]]) == (200, ["tiny"])
    assert headers["x-ratelimit-limit-requests"] == "1000"
    assert headers["x-request-id"].startswith("req_")
    assert (await get(stack, "/v1/models/"))[0] == 404
    assert stack.gateway.admission.calls == calls
