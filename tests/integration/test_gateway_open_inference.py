"""The REST form of the Open Inference Protocol on a running gateway, with the real tritonclient."""

from typing import Any

import pytest
from redis.asyncio import Redis

from integration.gateway_fixtures import Stack, lower, model, running_stack, stack
from scheduler.payload import decode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome
from triton_client import run_triton

__all__ = ["stack"]

BODY: dict[str, Any] = {
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}],
    "parameters": {"max_tokens": 3},
}
SCRIPT = """
client = triton.InferenceServerClient(address)
found = {
    "live": client.is_server_live(),
    "ready": client.is_server_ready(),
    "model_ready": client.is_model_ready("tiny", headers=headers),
    "server": client.get_server_metadata(),
    "model": client.get_model_metadata("tiny", "1", headers=headers),
    "two": strings(client.infer("tiny", texts("one", "two"), headers=headers)),
    "column": client.infer("tiny", texts("ab", shape=[1, 1]), "1", headers=headers).as_numpy("text_output").shape,
}
for coding in ("gzip", "deflate"):
    found[coding] = strings(client.infer("tiny", texts("abc"), request_compression_algorithm=coding, headers=dict(headers)))
wanted = [triton.InferRequestedOutput("text_output", binary_data=False)]
result = client.infer("tiny", texts("abc"), request_id="7", outputs=wanted, parameters={"max_tokens": 3}, headers=headers)
found["json"] = strings(result)
found["id"] = result.get_response()["id"]
for name, call in {
    "unknown": lambda: client.infer("none", texts("a"), headers=headers),
    "version": lambda: client.infer("tiny", texts("a"), "2", headers=headers),
    "key": lambda: client.infer("tiny", texts("a")),
    "sequence": lambda: client.infer("tiny", texts("a"), sequence_id=3, headers=headers),
    "repository": lambda: client.get_model_repository_index(headers=headers),
}.items():
    try:
        call()
    except triton.InferenceServerException as error:
        found[name] = str(error)
print(json.dumps(found))
"""


async def infer(stack: Stack, body: Any = None, path: str = "tiny", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """POST an inference; status, document and headers."""
    url = f"{stack.url}/v2/models/{path}/infer"
    sent = {"json": BODY if body is None else body} if not isinstance(body, bytes) else {"data": body}
    async with stack.http.post(url, **sent, headers=stack.key() | headers) as response:
        return response.status, await response.json(), lower(response.headers)


@pytest.mark.parametrize("kind", ["http", "json"])
async def test_tritonclient(stack: Stack, kind: str) -> None:
    """Metadata, readiness, binary and JSON tensors, and errors whose text names what is wrong."""
    found = await run_triton(kind, SCRIPT, stack.url.removeprefix("http://"), stack.catalog.keys["free"].text)

    assert (found["live"], found["ready"], found["model_ready"]) == (True, True, True)
    assert found["server"]["name"] == "tierlane"
    assert found["server"]["extensions"] == ["binary_tensor_data", "parameters"]
    tensor = {"datatype": "BYTES", "shape": [-1]}
    assert found["model"] == {
        "name": "tiny",
        "versions": ["1"],
        "platform": "tierlane",
        "inputs": [{"name": "text_input", **tensor}],
        "outputs": [{"name": "text_output", **tensor}],
    }
    assert (found["two"], found["column"], found["json"], found["id"]) == (["eno", "owt"], [1, 1], ["cba"], "7")
    assert found["unknown"] == "[404] There is no such model. Models: `tiny`."
    assert found["version"].startswith("[404] Models have only the version 1")
    assert found["key"].startswith("[401] ")
    assert found["sequence"].startswith("[400] `parameters.sequence_id` is not supported")
    assert (found["gzip"], found["deflate"]) == (["cba"], ["cba"])
    assert found["repository"].startswith("[404] There is no resource")


async def test_a_response_has_limits_and_an_error_its_code(stack: Stack) -> None:
    """In the headers as everywhere; the error is a text, and its other fields are beside it."""
    received: list[Any] = []

    def complete(member: ClaimedRequest) -> Outcome:
        received.append(decode_payload(member.body))
        return Outcome(member.id, "", 1.5, 8, "v7", "hi!", 3, "length")

    stack.worker.answerer = complete
    stack.catalog.set(key={"burst": 4.0, "requests_per_second": 0.05})  # A new bucket holds a quarter.
    status, body, headers = await infer(stack)
    limited, fault, limits = await infer(stack)

    assert (status, body["outputs"][0]["data"], body["model_name"]) == (200, ["hi!"], "tiny")
    assert body["parameters"] == {"request_id": stack.worker.seen[0], "tokens_used": 8, "finish_reason": "length"}
    assert (received[0].input, received[0].parameters) == ("hello", {"max_tokens": 3})
    assert headers["x-request-id"] == stack.worker.seen[0]
    assert headers["x-ratelimit-limit-requests"] == "4"
    assert (limited, fault["code"]) == (429, "rate_limit_exceeded")
    assert isinstance(fault["error"], str)
    assert (fault["request_id"], fault["retry_after_ms"]) == (limits["x-request-id"], int(limits["retry-after-ms"]))


async def test_a_list_is_admitted_as_a_whole(stack: Stack) -> None:
    """Four elements where three requests are left are rejected and charged nothing; three are admitted after it."""
    stack.catalog.set(key={"burst": 12.0, "requests_per_second": 0.001})

    def body(count: int) -> dict[str, Any]:
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [count], "data": ["ab"] * count}
        return {"inputs": [tensor]}

    rejected, _, _ = await infer(stack, body(4))
    accepted, found, _ = await infer(stack, body(3))
    too_long, fault, _ = await infer(stack, body(257))

    assert (rejected, accepted, found["outputs"][0]["data"]) == (429, 200, ["ba"] * 3)
    assert (too_long, fault["param"]) == (400, "text_input")
    assert len(stack.worker.seen) == 3


async def test_an_idempotency_key_replays_the_response(stack: Stack) -> None:
    """Also of a list, with the id of the first request."""
    first = await infer(stack, **{"Idempotency-Key": "k"})
    second = await infer(stack, **{"Idempotency-Key": "k"})

    assert (second[1], second[2]["idempotent-replayed"]) == (first[1], "true")
    assert len(stack.worker.seen) == 1


async def test_names_with_slashes_and_methods(stack: Stack) -> None:
    """The model of a path may have slashes; other methods are rejected with those that the path accepts."""
    stack.catalog.set(models=(model("tiny"), model("org/large:v2")))

    status, body, _ = await infer(stack, path="org/large:v2/versions/1")
    async with stack.http.get(f"{stack.url}/v2/models/org/large:v2", headers=stack.key()) as response:
        metadata = await response.json()
    async with stack.http.get(f"{stack.url}/v2/models/tiny/infer") as response:
        refused = response.status, response.headers["Allow"], await response.json()
    async with stack.http.get(f"{stack.url}/v2/models/tiny") as response:
        unknown = response.status, (await response.json())["code"]

    assert (status, body["model_name"], metadata["name"]) == (200, "org/large:v2", "org/large:v2")
    assert refused[:2] == (405, "POST")
    assert isinstance(refused[2]["error"], str)
    assert unknown == (401, "invalid_api_key")


async def test_readiness_of_a_model_without_a_worker(client: Redis, redis_url: str) -> None:
    """503 once its pool has no healthy GPU, and for the server while it drains; liveness does not change."""
    async with running_stack(client, redis_url, worker=False) as stack:
        stack.gateway.limits._no_gpu_since = 0.0
        stack.gateway.drain_state.leaving = True
        found = {}
        for path in ("health/live", "health/ready", "models/tiny/ready"):
            async with stack.http.get(f"{stack.url}/v2/{path}", headers=stack.key()) as response:
                found[path] = response.status, await response.json()

    assert found == {
        "health/live": (200, {"live": True}),
        "health/ready": (503, {"ready": False}),
        "models/tiny/ready": (503, {"name": "tiny", "ready": False}),
    }
