"""Models by customer and key: every API, batches, jobs and direct mode reject the others as unknown models."""

from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from integration.batch_fixtures import StartBatches, jsonl, line, start_batches
from integration.direct_mode_fixtures import Direct, direct
from integration.gateway_fixtures import Stack, caller, model, reverse, running_stack, stack
from integration.jobs_fixtures import JobBench, bench, start_jobs
from integration.ledger_fixtures import database_url, db, postgres_server
from scheduler.payload import decode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome

__all__ = [
    "bench",
    "caller",
    "database_url",
    "db",
    "direct",
    "postgres_server",
    "stack",
    "start_batches",
    "start_jobs",
]

MODELS = (model("tiny"), model("large"), model("secret"))
HELLO = [{"role": "user", "content": "hello"}]
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/inference": {"input": "hello"},
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/embeddings": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "hello", "store": False},
    "/v1/responses/input_tokens": {"input": "hello"},
}
"""The endpoints with a field `model`."""


async def post(stack: Stack, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    async with stack.http.post(stack.url + path, json=body, headers=stack.key() | headers) as response:
        return response.status, await response.json()


def allow(stack: Stack, *names: str) -> None:
    """Limit every key to these models."""
    stack.catalog.set(models=MODELS, key={"models": names})


@pytest.mark.parametrize("path", BODIES)
async def test_another_model_is_unknown_to_the_key(stack: Stack, path: str) -> None:
    """404 `model_not_found`, with the models that the key may use; the same error as for a model that does not exist."""
    allow(stack, "large", "tiny")

    assert (await post(stack, path, BODIES[path] | {"model": "tiny"}))[0] == 200
    ran = list(stack.worker.seen)
    answers = [await post(stack, path, BODIES[path] | {"model": name}) for name in ("secret", "nobody")]

    errors = [document["error"] for _, document in answers]
    message = "There is no such model, or this key may not use it. Models: `large`, `tiny`."
    assert [status for status, _ in answers] == [404, 404]
    assert [error["message"] for error in errors] == [message] * 2
    codes = [error["details"]["error_code"] if "details" in error else error["code"] for error in errors]
    assert codes == ["model_not_found"] * 2
    assert stack.worker.seen == ran


async def test_predict_and_tensors(stack: Stack) -> None:
    """Formats with another field, and the model in the path; errors before the model is checked do not name others either."""
    allow(stack, "tiny")

    allowed = await post(stack, "/v1/predict", {"model_id": "tiny", "input_data": "a"})
    predict = await post(stack, "/v1/predict", {"model_id": "secret", "input_data": "a"})
    tensors = [await post(stack, f"/v2/models/{name}/infer", {"inputs": [TENSOR]}) for name in ("tiny", "secret", "no")]

    assert (allowed[0], predict[0], predict[1]["error"]["param"]) == (200, 404, "model_id")
    assert [status for status, _ in tensors] == [200, 404, 404]
    message = "There is no such model, or this key may not use it. Models: `tiny`."
    assert [document["error"] for _, document in tensors[1:]] == [message] * 2
    for path in ("", "/ready"):
        answers = []
        for name in ("tiny", "secret"):
            async with stack.http.get(f"{stack.url}/v2/models/{name}{path}", headers=stack.key()) as response:
                answers.append((response.status, "large" in await response.text()))
        assert answers == [(200, False), (404, False)]


async def test_the_lists_show_only_what_the_key_may_use(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """`GET /v1/models` in both formats, one model, and `GET /v1/me`."""
    allow(stack, "tiny", "large", "gone")
    listed = [each.id async for each in caller.models.list()]
    with pytest.raises(openai.NotFoundError) as caught:
        await caller.models.retrieve("secret")
    async with stack.http.get(
        f"{stack.url}/v1/models", headers=stack.key() | {"anthropic-version": "2023-06-01"}
    ) as response:
        messages = await response.json()
    async with stack.http.get(f"{stack.url}/v1/me", headers=stack.key()) as response:
        me = await response.json()

    assert listed == ["large", "tiny"] == [each["id"] for each in messages["data"]]
    assert (messages["first_id"], messages["last_id"]) == ("large", "tiny")
    assert (await caller.models.retrieve("tiny")).id == "tiny"
    assert caught.value.code == "model_not_found"
    assert me["models"] == ["tiny", "large", "gone"]


@pytest.mark.parametrize(
    ("allowed", "used"),
    [
        (("secret", "tiny"), "tiny"),
        (("gone", "large", "secret"), "large"),
        (("secret", "large"), "secret"),
        (("gone",), None),
        ((), None),
    ],
)
async def test_a_request_without_a_model(
    client: Redis, redis_url: str, allowed: tuple[str, ...], used: str | None
) -> None:
    """The default model, if the key may use it, else the first of its list that is served, else 404."""
    async with running_stack(client, redis_url, default_model="tiny") as stack:
        allow(stack, *allowed)
        models: list[str] = []

        def answer(member: ClaimedRequest) -> Outcome:
            models.append(decode_payload(member.body).model)
            return reverse(member)

        stack.worker.answerer = answer
        status, document = await post(stack, "/v1/inference", {"input": "a"})
        # A format without a field for the model; with a key of idempotency the request is not on the fast path.
        plain, _ = await post(stack, "/api/inference", {"input": "a"}, **{"Idempotency-Key": "k"})

    assert (status, plain) == ((404, 404) if used is None else (200, 200))
    assert models == ([] if used is None else [used] * 2)
    if used is None:
        assert document["error"]["message"] == (
            "`model` is required: there is no default model. No model that this key may use is served now."
        )


async def test_jobs(bench: JobBench) -> None:
    """A job of another model is rejected; one that was accepted before the change is completed."""
    bench.catalog.set(models=MODELS)
    bench.stack.worker.hold = True
    accepted = await bench.accepted({"input": "abc", "model": "secret"})
    bench.catalog.set(models=MODELS, key={"models": ("tiny",)})
    status, document, _ = await bench.submit({"input": "abc", "model": "secret"})
    bench.stack.worker.hold = False

    assert (status, document["error"]["code"]) == (404, "model_not_found")
    assert (await bench.ended(accepted))["output"] == "cba"


async def test_lines_of_a_batch_have_the_models_of_their_key(start_batches: StartBatches) -> None:
    """Also if the customer may use more."""
    async with start_batches() as running:
        running.stack.catalog.set(models=MODELS, key={"models": ("tiny",)})
        lines = [line("a", prompt="a", model="tiny"), line("b", prompt="b", model="secret")]
        file = await running.client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        created = await running.client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        batch = await running.until(created.id)
        served = await running.lines(batch.output_file_id)
        (failed,) = await running.lines(batch.error_file_id)

    assert [each["custom_id"] for each in served] == ["a"]
    error = failed["response"]["body"]["error"]
    assert (failed["custom_id"], error["code"]) == ("b", "model_not_found")
    assert "`large`" not in error["message"]


async def test_direct_mode(direct: Direct) -> None:
    """Without Redis the models of the key apply too."""
    async with direct.stack("serve", active=True) as (stack, _):
        allow(stack, "tiny")
        served, _, _ = await stack.infer({"input": "abc", "model": "tiny"}, "enterprise")
        refused, document, _ = await stack.infer({"input": "abc", "model": "secret"}, "enterprise")

    assert (served, refused, document["error"]["code"]) == (200, 404, "model_not_found")
