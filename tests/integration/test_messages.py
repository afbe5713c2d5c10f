"""`/v1/messages` with the real `anthropic` client: a chat that an endpoint answers, a model without one, errors, counts."""

import math
import re
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from redis.asyncio import Redis

from api_description import Described
from endpoint_stand_in import StandIn
from eventually import eventually
from gateway.openapi.document import openapi
from gateway.openapi.endpoints import ENDPOINTS
from integration.endpoint_fixtures import stand_in
from integration.gateway_fixtures import Stack, lower, reverse_or_vector, running_stack, tier
from integration.gpu_pool_fixtures import StartWorker, faulty_models, start_worker
from integration.streaming_fixtures import stack
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import ClaimedRequest, Outcome

__all__ = ["faulty_models", "stack", "stand_in", "start_worker"]

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL: Any = {"name": "weather", "description": "now", "input_schema": {"type": "object"}}
PNG: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def anthropic_client(stack: Stack, **options: Any) -> anthropic.AsyncAnthropic:
    """Anthropic's client with the key of the free customer, without retries of its own."""
    key = stack.catalog.keys["free"].text
    return anthropic.AsyncAnthropic(**{"api_key": key, "base_url": stack.url, "max_retries": 0} | options)


@pytest.fixture
async def served(stack: Stack, start_worker: StartWorker, stand_in: StandIn) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """A client of a gateway with a worker in front of the stand-in, where chats are passed on."""
    stack.worker.backend = f"openai:{stand_in.url}"
    await (await start_worker(backend=f"openai:{stand_in.url}")).reaches("ready")
    await eventually(lambda: stack.gateway.heartbeat.passes_on, "the pool passes chats on")
    async with anthropic_client(stack) as caller:
        yield caller


@pytest.fixture
async def plain(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway whose worker generates text: the conversation reversed."""
    async with running_stack(client, redis_url) as running:
        running.worker.answerer = reverse_or_vector
        yield running


async def test_text(stack: Stack, served: anthropic.AsyncAnthropic, stand_in: StandIn) -> None:
    """The system prompt and the messages arrive, and the response has the id of the request."""
    message = await served.messages.create(
        model="tiny",
        max_tokens=64,
        system="Be brief.",
        messages=HELLO,
        stop_sequences=["END"],
        extra_body={"temperature": 0.5},
    )
    asked = stand_in.asked("chat/completions")[-1]

    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "olleh"}]
    assert (message.stop_reason, message.role, message.model) == ("max_tokens", "assistant", "tiny")
    assert message.id == message._request_id
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0
    assert asked["messages"] == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert (asked["max_tokens"], asked["stop"], asked["temperature"]) == (64, ["END"], 0.5)


async def test_tools(served: anthropic.AsyncAnthropic, stand_in: StandIn) -> None:
    """Calls come as `tool_use`, and go back with their results, as Anthropic's client sends them."""
    options: Any = {"model": "tiny", "max_tokens": 99, "tools": [TOOL]}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    called = await served.messages.create(messages=HELLO, tool_choice=choice, **options)
    asked = stand_in.asked("chat/completions")[-1]
    use: Any = called.content[0]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "21 °C", "is_error": True}
    history: Any = [*HELLO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    await served.messages.create(messages=history, **options)
    _, assistant, answer = stand_in.asked("chat/completions")[-1]["messages"]

    assert (called.stop_reason, use.type, use.name, use.input["at"]) == ("tool_use", "tool_use", "weather", 0)
    assert (asked["tool_choice"], asked["parallel_tool_calls"]) == ("required", False)
    assert assistant["tool_calls"][0]["id"] == use.id
    assert answer == {"role": "tool", "tool_call_id": use.id, "content": "Error: 21 °C"}


async def test_the_tool_runner(served: anthropic.AsyncAnthropic, stand_in: StandIn) -> None:
    """It begins a conversation that the server stores, and continues without one, since that is rejected with its code."""

    @anthropic.beta_async_tool
    async def weather(q: str, at: int) -> str:
        """The weather."""
        return f"{at} °C"

    runner = served.beta.messages.tool_runner(
        model="tiny", max_tokens=99, messages=HELLO, tools=[weather], max_iterations=2
    )
    replies = [message.stop_reason async for message in runner]

    assert replies == ["tool_use", "end_turn"]
    assert stand_in.asked("chat/completions")[-1]["messages"][-1]["content"] == "0 °C"


async def test_images(served: anthropic.AsyncAnthropic, stand_in: StandIn) -> None:
    """As base64 and by URL."""
    linked = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    messages: Any = [{"role": "user", "content": [PNG, linked, {"type": "text", "text": "Which?"}]}]
    await served.messages.create(model="tiny", max_tokens=64, messages=messages)
    image, link, text = stand_in.asked("chat/completions")[-1]["messages"][0]["content"]

    assert image["image_url"]["url"] == "data:image/png;base64,AAAA"
    assert link["image_url"]["url"] == "https://example.com/a.png"
    assert text == {"type": "text", "text": "Which?"}


async def test_streams(served: anthropic.AsyncAnthropic) -> None:
    """The client assembles of a stream with thinking and tools what it gets without one, and gets its parts as they come."""
    options: Any = {
        "model": "tiny",
        "max_tokens": 9000,
        "messages": HELLO,
        "tools": [TOOL, TOOL | {"name": "time"}],
        "thinking": {"type": "enabled", "budget_tokens": 8000},
    }
    whole = await served.messages.create(**options)
    async with served.messages.stream(**options) as stream:
        events = [event async for event in stream]
        message = await stream.get_final_message()

    assert [block.type for block in whole.content] == ["thinking", "tool_use", "tool_use"]
    assert [block.to_dict() for block in message.content] == [block.to_dict() for block in whole.content]
    assert (message.stop_reason, message.usage) == (whole.stop_reason, whole.usage)
    kinds = [event.type for event in events]
    assert {"thinking", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    assert kinds[0] == "message_start"
    assert message.id.startswith("req_")


async def test_text_stream(served: anthropic.AsyncAnthropic) -> None:
    """Text arrives in pieces."""
    async with served.messages.stream(model="tiny", max_tokens=64, messages=HELLO) as stream:
        text = "".join([piece async for piece in stream.text_stream])

    assert text == "olleh"
    assert stream.response.headers["request-id"].startswith("req_")
    assert "anthropic-ratelimit-requests-remaining" in stream.response.headers


async def test_a_model_without_a_server(plain: Stack) -> None:
    """It continues text, whole and as a stream, and lacks other capabilities by name."""
    async with anthropic_client(plain) as caller:
        whole = await caller.messages.create(model="tiny", max_tokens=64, system="s", messages=HELLO)
        async with caller.messages.stream(model="tiny", max_tokens=64, system="s", messages=HELLO) as stream:
            message = await stream.get_final_message()
        with pytest.raises(anthropic.BadRequestError, match="`tools` needs the capability `tools`"):
            await caller.messages.create(model="tiny", max_tokens=64, messages=HELLO, tools=[TOOL])

    async with plain.http.get(f"{plain.url}/metrics") as response:
        metrics = await response.text()

    first: Any = whole.content[0]
    assert re.search(r'tierlane_requests_total{.*endpoint="/v1/messages".*outcome="completed".*} 2', metrics)
    assert "olleh" in first.text
    assert [block.to_dict() for block in message.content] == [first.to_dict()]
    assert whole.stop_reason == message.stop_reason == "end_turn"


async def test_errors(plain: Stack) -> None:
    """The client raises its class for each, with type, code and id."""
    options: Any = {"model": "tiny", "max_tokens": 64, "messages": HELLO}
    seen: dict[type, tuple[Any, Any]] = {}
    async with anthropic_client(plain) as caller, anthropic_client(plain, api_key="tl_wrong") as stranger:
        for sender, changes in (
            (stranger, {}),
            (caller, {"model": "none"}),
            (caller, {"extra_body": {"stop": ["x"]}}),
            (caller, {"messages": [{"role": "user", "content": "x" * 9_000_000}]}),
        ):
            with pytest.raises(anthropic.APIStatusError) as error:
                await sender.messages.create(**options | changes)
            assert error.value.request_id == error.value.body["request_id"]  # type: ignore[index]
            seen[type(error.value)] = (error.value.type, error.value.error_code)

    assert seen == {
        anthropic.AuthenticationError: ("authentication_error", "invalid_api_key"),
        anthropic.NotFoundError: ("not_found_error", "model_not_found"),
        anthropic.BadRequestError: ("invalid_request_error", "invalid_request"),
        anthropic.ContentTooLargeError: ("request_too_large", "request_too_large"),
    }


async def test_rate_limit(plain: Stack) -> None:
    """A 429 has Anthropic's class, the limits in its headers, and the time of a retry."""
    plain.catalog.set(tiers=(tier("free", 1, 0.1, requests_per_second=0.1, burst=4.0, tokens_per_minute=100_000),))
    async with anthropic_client(plain) as caller:
        await caller.messages.create(model="tiny", max_tokens=64, messages=HELLO)
        with pytest.raises(anthropic.RateLimitError) as error:
            await caller.messages.create(model="tiny", max_tokens=64, messages=HELLO)

    headers = lower(error.value.response.headers)
    assert error.value.type == "rate_limit_error"
    assert int(headers["retry-after"]) >= 1
    assert headers["anthropic-ratelimit-requests-limit"] == "4"
    assert headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert headers["anthropic-ratelimit-tokens-limit"] == "100000"
    assert headers["anthropic-ratelimit-tokens-reset"].endswith("Z")


def poisoned(member: ClaimedRequest) -> Outcome:
    """Fail the request."""
    return Outcome(member.id, ErrorCode.POISON_REQUEST, 1.0, 0, "v1", "")


async def test_a_failed_stream(plain: Stack) -> None:
    """It ends with an error event in Anthropic's form, which its client raises."""
    plain.worker.answerer = poisoned
    async with anthropic_client(plain) as caller:
        with pytest.raises(anthropic.APIStatusError) as error:
            async with caller.messages.stream(model="tiny", max_tokens=64, messages=HELLO) as stream:
                await stream.get_final_message()

    assert error.value.error_code == "poison_request"
    assert error.value.type == "invalid_request_error"


async def test_count_tokens(plain: Stack) -> None:
    """The estimate of admission, without a run, within the limit of auxiliary requests; an unknown model is an error."""
    plain.catalog.set(tiers=(tier("free", 1, 0.1, requests_per_second=0.1, burst=3.0),))
    async with anthropic_client(plain) as caller:
        counts = [
            (
                await caller.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": text}])
            ).input_tokens
            for text in ("", "x" * 4000)
        ]
        with pytest.raises(anthropic.NotFoundError):
            await caller.messages.count_tokens(model="none", messages=HELLO)

    assert counts[1] - counts[0] == 1000
    assert counts[0] == math.ceil(len('[{"role":"user","content":""}]') / 4)
    assert plain.worker.seen == []


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("POST", "/v1/messages", {"x-api-key": "KEY"}, 200, None),
        ("POST", "/v1/messages/count_tokens", {"x-api-key": "KEY", "anthropic-version": "2023-06-01"}, 200, None),
        ("POST", "/v1/messages?beta=true", {"Authorization": "Bearer KEY", "x-api-key": "tl_wrong"}, 200, None),
        ("POST", "/v1/messages", {"x-api-key": "tl_wrong"}, 401, "invalid_api_key"),
        ("POST", "/v1/messages/count_tokens", {}, 401, "invalid_api_key"),
        ("GET", "/v1/messages", {}, 405, "method_not_allowed"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found"),
    ],
)
async def test_keys_and_paths(
    plain: Stack, method: str, path: str, headers: dict[str, str], status: int, code: str | None
) -> None:
    """The key comes in either header; errors before the handler have Anthropic's form, too. All is as described."""
    key = plain.catalog.keys["free"].text
    sent = {name: value.replace("KEY", key) for name, value in headers.items()}
    body: Any = {"model": "tiny", "messages": HELLO} | ({} if "count" in path else {"max_tokens": 9})
    async with plain.http.request(method, plain.url + path, json=body, headers=sent) as response:
        document, raw, received = await response.json(), await response.read(), lower(response.headers)

    assert response.status == status
    assert received["request-id"] == received["x-request-id"]
    if code is not None:
        assert document["type"] == "error"
        assert document["error"]["details"]["error_code"] == code
        assert document["request_id"] == received["request-id"]
    if "batches" not in path:
        described = Described(openapi(ENDPOINTS, "1"))
        where = path.partition("?")[0]
        assert described.faults(where, "POST", status, received, raw) == []


async def test_other_paths_read_no_api_key_header(plain: Stack) -> None:
    """`x-api-key` is a header of these paths alone, and other errors keep OpenAI's form."""
    headers = {"x-api-key": plain.catalog.keys["free"].text}
    async with plain.http.post(f"{plain.url}/v1/chat/completions", json={}, headers=headers) as response:
        document = await response.json()

    assert (response.status, document["error"]["code"]) == (401, "invalid_api_key")
    assert "request-id" not in response.headers
