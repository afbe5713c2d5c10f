"""The OpenAI-compatible API with the real `openai` client: fields, parameters, responses, errors, retries and lists."""

import gc
import time
from contextlib import nullcontext
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from alive import alive
from eventually import eventually
from gateway.inference.call import InferenceCall
from gateway.inference.pending import PendingRequest
from integration.gateway_fixtures import Stack, caller, model, openai_client, reverse, stack
from pool import Pool
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, Task, decode_payload
from scheduler.prompt_messages import PromptMessage, decode_messages
from scheduler.protocol.admission import Verdict
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.states import Admission
from scheduler.vectors import write_vector

__all__ = ["caller", "stack"]

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
VALID: dict[str, dict[str, Any]] = {
    "completions": {"model": "tiny", "prompt": "a"},
    "chat.completions": {"model": "tiny", "messages": HELLO},
    "embeddings": {"model": "tiny", "input": "a"},
}
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": [1, 2]}, "prompt"),
    ("completions", {"prompt": [[1, 2]]}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": ["a", 1]}, "prompt"),
    ("completions", {"prompt": [[1], []]}, "prompt"),
    ("completions", {"extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ("completions", {"n": 2}, "n"),
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"echo": True}, "echo"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"logprobs": 1}, "logprobs"),
    ("completions", {"logit_bias": {"50256": -100}}, "logit_bias"),
    ("completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
    ("completions", {"stop": list("abcdefghijklmnopq")}, "stop"),
    ("completions", {"temperature": "warm"}, "temperature"),
    ("completions", {"extra_body": {"beams": 4}}, "beams"),
    ("completions", {"prompt": ["a", "b"], "stream": True}, "stream"),
    ("chat.completions", {"messages": []}, "messages"),
    ("chat.completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ("chat.completions", {"messages": [{"role": "user"}]}, "content"),
    ("chat.completions", {"messages": [{"role": "user", "content": IMAGE}]}, "messages"),
    ("chat.completions", {"n": 2}, "n"),
    ("chat.completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("chat.completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat.completions", {"logprobs": True}, "logprobs"),
    ("chat.completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("chat.completions", {"modalities": []}, "modalities"),
    ("chat.completions", {"store": True}, "store"),
    ("chat.completions", {"extra_body": {"safety_identifier": 1}}, "safety_identifier"),
    ("chat.completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ("chat.completions", {"service_tier": "priority"}, "service_tier"),
    ("chat.completions", {"extra_body": {"service_tier": "gold"}}, "service_tier"),
    ("chat.completions", {"extra_body": {"beams": 4}}, "beams"),
    ("chat.completions", {"extra_body": {"top_k": 4}}, "top_k"),
    ("embeddings", {"input": [1, 2, 3]}, "input"),
    ("embeddings", {"input": [[1, 2], [3]]}, "input"),
    ("embeddings", {"input": []}, "input"),
    ("embeddings", {"input": ["a", ""]}, "input"),
    ("embeddings", {"dimensions": 2}, "dimensions"),
    ("embeddings", {"encoding_format": "hex"}, "encoding_format"),
]


def create(caller: openai.AsyncOpenAI, endpoint: str, changes: dict[str, Any]) -> Any:
    resource: Any = caller
    for name in endpoint.split("."):
        resource = getattr(resource, name)
    return resource.create(**VALID[endpoint] | changes)


@pytest.fixture
def payloads(stack: Stack) -> list[Payload]:
    """The payloads that the worker gets; it returns three tokens of eight, cut off by the length limit."""
    received: list[Payload] = []

    def complete(member: ClaimedRequest) -> Outcome:
        received.append(decode_payload(member.body))
        return Outcome(member.id, "", 1.5, 8, "v7", "hi!", 3, "length")

    stack.worker.answerer = complete
    return received


@pytest.mark.parametrize(("allowed", "reaches"), [(None, False), ({"tools"}, False), ({"dimensions"}, True)])
async def test_fields_of_embeddings_reach_a_model_without_an_endpoint_by_its_row(
    stack: Stack, caller: openai.AsyncOpenAI, allowed: set[str] | None, reaches: bool
) -> None:
    """A class may read them. Without the row the gateway rejects them by name."""
    received: list[Payload] = []

    def embed(member: ClaimedRequest) -> Outcome:
        received.append(decode_payload(member.body))
        return Outcome(member.id, "", 1.5, 8, "v7", write_vector([1.0]))

    stack.worker.answerer = embed
    await eventually(lambda: stack.gateway.heartbeat.passes_on is False, "the worker has no endpoint")
    stack.catalog.set(models=(model(capabilities=None if allowed is None else frozenset(allowed)),))
    with nullcontext() if reaches else pytest.raises(openai.BadRequestError, match="dimensions"):
        await caller.embeddings.create(model="tiny", input="a", dimensions=3)

    assert [(each.task, each.parameters) for each in received] == [(Task.EMBED, {"dimensions": 3})] * reaches


async def test_completions(stack: Stack, caller: openai.AsyncOpenAI, payloads: list[Payload]) -> None:
    """The response has text, finish reason and usage. Only the sampling parameters that are set reach the worker."""
    made = await caller.completions.create(model="tiny", prompt="hello")
    options: Any = {"max_tokens": 7, "temperature": 0.5, "top_p": 1, "seed": 3, "stop": "x"}
    ignored: Any = {"n": 1, "echo": False, "user": "u", "extra_body": {"safety_identifier": "s"}}
    await caller.completions.create(model="tiny", prompt=["a"], **options, **ignored)
    await caller.completions.create(model="tiny", prompt="a", stop=["x", "y"], best_of=1, presence_penalty=0)

    assert [(each.index, each.text, each.finish_reason) for each in made.choices] == [(0, "hi!", "length")]
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (5, 3, 8)
    assert (made.object, made.model, made.created > 1_700_000_000) == ("text_completion", "tiny", True)
    assert made.id == stack.worker.seen[0] == made._request_id
    assert [payload.parameters for payload in payloads] == [
        {},
        {"max_tokens": 7, "temperature": 0.5, "top_p": 1.0, "seed": 3, "stop": ["x"]},
        {"stop": ["x", "y"]},
    ]


async def test_chat(stack: Stack, caller: openai.AsyncOpenAI, payloads: list[Payload]) -> None:
    """All roles and text parts reach the worker, and a response message can be sent back as it was dumped."""
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "hi", "name": "bot"},
        {"role": "developer", "content": "briefer"},
    ]
    made = await caller.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=3, temperature=0.5
    )
    dumped: Any = made.choices[0].message.model_dump()
    flex: Any = {"service_tier": "flex"}
    second = await caller.chat.completions.create(model="tiny", messages=[*HELLO, dumped, *HELLO], **flex)

    (choice,) = made.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "hi!")
    assert (choice.finish_reason, made.object, made.system_fingerprint) == ("length", "chat.completion", "v7")
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (5, 3, 8)
    assert made.id == stack.worker.seen[0] == made._request_id
    assert (made.service_tier, second.service_tier) == ("default", "flex")
    assert (payloads[0].task, payloads[0].parameters) == (Task.CHAT, {"max_tokens": 3, "temperature": 0.5})
    assert decode_messages(payloads[0].input) == [
        PromptMessage("system", "Be brief."),
        PromptMessage("user", "hello"),
        PromptMessage("assistant", "hi"),
        PromptMessage("developer", "briefer"),
    ]
    assert [message.content for message in decode_messages(payloads[1].input)] == ["hello", "hi!", "hello"]


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "base64"}, {"encoding_format": "float"}])
async def test_embeddings(stack: Stack, caller: openai.AsyncOpenAI, encoding: Any) -> None:
    """Each text is one request; vectors come in the order of the texts, in the encoding that the client asks for."""
    stack.worker.answerer = lambda member: Outcome(
        member.id, "", 1.5, 4, "v1", write_vector([float(len(decode_payload(member.body).input)), 0.5])
    )
    made = await caller.embeddings.create(model="tiny", input=["a", "bb", "ccc"], **encoding)
    single = await caller.embeddings.create(model="tiny", input="abcd")

    vectors: list[Any] = [each.embedding for each in made.data]
    if encoding.get("encoding_format") == "base64":
        assert vectors[0] == write_vector([1.0, 0.5])
    else:
        assert vectors == [[1.0, 0.5], [2.0, 0.5], [3.0, 0.5]]
    assert [each.index for each in made.data] == [0, 1, 2]
    assert (made.object, made.data[0].object, made.model) == ("list", "embedding", "tiny")
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (12, 12)
    assert [each.embedding for each in single.data] == [[4.0, 0.5]]
    assert len(stack.worker.seen) == 4


async def test_unsupported_fields_are_rejected_by_name(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """A field that the gateway cannot honour is a 400 that names it, and no request reaches the worker."""
    for endpoint, changes, param in UNSUPPORTED:
        with pytest.raises(openai.BadRequestError) as caught:
            await create(caller, endpoint, changes)
        assert (caught.value.code, caught.value.param) == ("invalid_request", param), (endpoint, changes)
        assert (caught.value.request_id or "").startswith("req_")
    assert stack.worker.seen == []


async def test_fields_without_effect_are_accepted(caller: openai.AsyncOpenAI, payloads: list[Payload]) -> None:
    """Fields with values that request the default behaviour, or null, are accepted and not passed to the worker."""
    fields: Any = {
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "modalities": ["text"],
        "store": False,
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
        "n": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logprobs": False,
    }
    of_servers = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False}
    for changes in (*({name: value} for name, value in fields.items()), fields, dict.fromkeys(fields)):
        await create(caller, "chat.completions", changes)
    for endpoint in ("chat.completions", "completions"):
        await create(caller, endpoint, {"extra_body": of_servers})

    assert [payload.parameters for payload in payloads] == [{}] * (len(fields) + 4)


@pytest.mark.parametrize(
    ("message", "param"),
    [("parameters.top_p must be above 0 and at most 1.", "top_p"), ("The model does not support this.", None)],
)
async def test_a_parameter_rejected_by_the_model(
    stack: Stack, caller: openai.AsyncOpenAI, message: str, param: str | None
) -> None:
    """The worker's message is returned with the parameter named as the client sent it."""
    stack.worker.answerer = lambda member: Outcome(member.id, ErrorCode.INVALID_REQUEST, 1.0, 0, "v1", message)

    with pytest.raises(openai.BadRequestError) as caught:
        await create(caller, "completions", {"top_p": 0})

    assert caught.value.param == param
    assert message.removeprefix("parameters.") in str(caught.value)


async def test_the_client_waits_as_it_is_told(stack: Stack) -> None:
    """The client's own retry waits for Retry-After and succeeds; the gateway counts it as a retry."""
    counted: list[str] = []
    stack.gateway._demand_meter.retried = counted.append
    stack.catalog.set(key={"requests_per_second": 0.5, "burst": 4.0})  # A new bucket holds a quarter: one request.
    async with openai_client(stack, retries=2) as caller:
        await create(caller, "completions", {})
        began = time.monotonic()
        await create(caller, "completions", {})
        waited_s = time.monotonic() - began

    assert 0.55 < waited_s < 3.5  # The rest of two seconds and up to a quarter more; its own backoff is half a second.
    assert counted == ["free"]


async def test_models(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Enabled models of this pool are listed by name and read by id, for customers only and without a charge."""
    others = (model("off", enabled=False), model("away", pool="other"))
    stack.catalog.set(models=(model("tiny"), model("org/large:v2"), *others))
    calls = stack.gateway.admission.calls
    listed = [each async for each in caller.models.list()]
    one = await caller.models.retrieve("org/large:v2")
    with pytest.raises(openai.NotFoundError) as caught:
        await caller.models.retrieve("off")

    assert [(each.id, each.object) for each in listed] == [("org/large:v2", "model"), ("tiny", "model")]
    found: Any = one
    assert (found.id, found.root, found.owned_by, found.created) == ("org/large:v2", "org/large:v2", "tierlane", 0)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    for path, key, status in (("", {}, 401), ("/tiny", {}, 401), ("/", stack.key(), 200), ("", stack.key(), 200)):
        async with stack.http.get(f"{stack.url}/v1/models{path}", headers=key) as response:
            assert response.status == status
    assert response.headers["x-ratelimit-limit-requests"] == "1000"
    assert response.headers["x-request-id"].startswith("req_")
    assert stack.gateway.admission.calls == calls


async def test_the_context_length_of_a_model(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """As its workers report it, under the names of vLLM and Anthropic; a text that cannot fit is rejected with it."""
    stack.worker.backend, stack.worker.context_tokens = "openai:http://127.0.0.1:1/v1", 100

    async def known() -> bool:
        return (await caller.models.retrieve("tiny")).model_extra == {"root": "tiny", "max_model_len": 100}

    await eventually(known, "the context length is in the list of models")
    async with stack.http.get(
        f"{stack.url}/v1/models", headers=stack.key() | {"anthropic-version": "2023-06-01"}
    ) as response:
        assert [each["max_input_tokens"] for each in (await response.json())["data"]] == [100]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 100 tokens") as caught:
        await complete(caller, "x" * 4000)
    assert caught.value.code == "context_length_exceeded"


async def complete(caller: openai.AsyncOpenAI, prompt: Any, **options: Any) -> Any:
    return await caller.completions.create(model="tiny", prompt=prompt, **options)


async def test_a_choice_for_each_prompt(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Choices come in the order of the prompts, with the usage of all; the first request's id is the response's."""
    stack.worker.answerer = lambda member: Outcome(
        member.id, "", 1.5, 3, "v1", decode_payload(member.body).input[::-1], 1
    )
    prompts = [f"prompt {i}" for i in range(40)]

    made = await complete(caller, prompts)

    assert [(each.index, each.text) for each in made.choices] == [(i, p[::-1]) for i, p in enumerate(prompts)]
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (80, 40)
    assert len(set(stack.worker.seen)) == 40
    assert made.id == made._request_id
    assert made.id in stack.worker.seen


async def test_a_list_over_the_limit_is_charged_nothing(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """A list of four where three requests are left gets 429, and a list of three is admitted after it."""
    stack.catalog.set(key={"burst": 12.0, "requests_per_second": 0.001})

    with pytest.raises(openai.RateLimitError):
        await complete(caller, ["a", "b", "c", "d"])
    made = await complete(caller, ["a", "b", "c"])

    assert [each.text for each in made.choices] == ["a", "b", "c"]
    assert len(stack.worker.seen) == 3


@pytest.mark.parametrize(
    ("key", "factor", "count", "status", "code"),
    [
        ({}, 1.0, 257, 400, "invalid_request"),
        ({"burst": 12.0}, 1.0, 13, 400, "invalid_request"),
        ({"max_concurrency": 5}, 1.0, 6, 400, "invalid_request"),
        ({}, 0.01, 20, 503, "reduced_capacity"),
    ],
)
async def test_a_list_that_cannot_be_admitted(
    stack: Stack, caller: openai.AsyncOpenAI, key: dict[str, float], factor: float, count: int, status: int, code: str
) -> None:
    """A list longer than the full limits allow is an invalid request; one that only reduced limits reject gets 503."""
    stack.catalog.set(key=key)
    stack.gateway.limits.factor = lambda tier: factor

    with pytest.raises(openai.APIStatusError) as caught:
        await complete(caller, ["a"] * count)

    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.param == ("prompt" if status == 400 else None)
    assert stack.worker.seen == []


def failing(code: ErrorCode) -> Any:
    """Return an answerer that fails the input `bad` with `code`."""

    def complete(member: ClaimedRequest) -> Outcome:
        bad = decode_payload(member.body).input == "bad"
        return Outcome(member.id, code, 1.5, 0, "v1", "") if bad else reverse(member)

    return complete


@pytest.mark.parametrize("prompts", [["bad", "a", "b"], ["a", "b", "bad"]])
async def test_a_list_that_fails_by_an_slo_failure_is_refunded(
    stack: Stack, caller: openai.AsyncOpenAI, client: Redis, pool: Pool, prompts: list[str]
) -> None:
    """When a worker is lost with one member, all members are refunded, also those that completed or were queued. Each
    audit row has the error code that the client got.
    """
    stack.catalog.set(key={"quotas": (("1day", 10),)})
    stack.worker.answerer = failing(ErrorCode.WORKER_LOST)
    stack.worker.most = 2

    with pytest.raises(openai.InternalServerError) as caught:
        await complete(caller, prompts)

    assert caught.value.code == "worker_lost"

    async def audited() -> bool:
        ends = {end.id: end.error_code for end in (await pool.audit())[1]}
        return list(ends.values()) == ["worker_lost"] * 3

    await eventually(audited, "each row has the code that was returned")
    spent = await client.hget("rl:customer:customer-free", "q:1day")
    assert spent is not None
    assert spent.split()[1] == b"0"
    assert await client.zcard("rl:leases:customer-free") == 0
    assert len(stack.gateway.pending_requests) == 0


async def test_a_client_that_disconnects_cancels_the_list(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """After the client has disconnected, no member of its list runs."""
    stack.worker.hold = True

    with pytest.raises(openai.APITimeoutError):
        await complete(caller.with_options(timeout=0.3), ["a", "b", "c"])
    await eventually(lambda: len(stack.gateway.pending_requests) == 0, "no request is pending")
    stack.worker.hold = False
    made = await complete(caller, "next")

    assert stack.worker.seen == [made.id]


async def test_a_retry_with_an_idempotency_key(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """The same list under its key is replayed. A longer, shorter or other list, or a single text, is another body."""
    prompts: list[Any] = ["ab", "cd"]
    others: list[Any] = [["ab", "cd", "ef"], ["ab"], "ab", ["cd"], ["ab", "xx"]]
    for number, (first, other) in enumerate(
        [(prompts, each) for each in others] + [(each, prompts) for each in others]
    ):
        headers = {"Idempotency-Key": f"order-{number}"}
        made = await complete(caller, first, extra_headers=headers)
        runs = len(stack.worker.seen)
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await complete(caller, other, extra_headers=headers)
        raw = await caller.completions.with_raw_response.create(model="tiny", prompt=first, extra_headers=headers)
        replay = raw.parse()

        assert caught.value.code == "idempotency_key_reused"
        assert raw.headers["Idempotent-Replayed"] == "true"
        assert [each.text for each in replay.choices] == [each.text for each in made.choices]
        assert (replay.id, len(stack.worker.seen)) == (made.id, runs)


@pytest.mark.parametrize("case", ["admitted", "rejected", "moved"])
@pytest.mark.parametrize("body", [{"prompt": ["a", "b", "c"]}, {"prompt": "a", "stream": True}])
async def test_lists_and_streams_leave_no_reference_cycles(stack: Stack, body: dict[str, Any], case: str) -> None:
    """Members reference each other, and a stream its call, until the response is sent; then all are freed at once.

    So are those of a call whose customer has another cell when they are admitted.
    """
    submit = stack.gateway.admission.submit

    def moved(first: PendingRequest) -> bool:
        stack.gateway.admission.submit = submit
        for each in first.together or (first,):
            each.finish(Verdict(Admission.ELSEWHERE, stored_id="default"))
        return True

    if case == "rejected":
        stack.gateway.limits.no_gpu = lambda _: True
    elif case == "moved":
        stack.gateway.admission.submit = moved
    gc.collect()
    gc.disable()
    try:
        async with stack.http.post(
            f"{stack.url}/v1/completions",
            json={"model": "tiny", **body},
            headers={**stack.key(), "Connection": "close"},
        ) as response:
            await response.read()
        await eventually(lambda: not alive(InferenceCall, PendingRequest), "all are freed")
    finally:
        gc.enable()

    assert response.status == (503 if case == "rejected" else 200)
