"""The response to a chat of Anthropic's Messages: content, reasons, tokens, errors, headers."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoint_stand_in import rich_chat, rich_events
from gateway.api.format import InferenceRequest
from gateway.translations.message_body import ToolUseBlock
from gateway.translations.message_endpoints import error_body, header_lines
from gateway.translations.message_events import MAX_HELD_BYTES, MessageChunks, MessageContent, message_of
from gateway.translations.messages import read_messages
from scheduler.chat_document import DOCUMENT, output_line
from scheduler.errors import HTTP, ErrorCode, RequestError
from scheduler.protocol.replies import Reply

HELLO = [{"role": "user", "content": "hello"}]


def body(**changes: Any) -> bytes:
    fields = {"model": "m", "max_tokens": 9, "messages": HELLO} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def reply(output: str, finish_reason: str = DOCUMENT, **changes: Any) -> Reply:
    made = Reply(
        "req_" + "0" * 12 + "7" + "0" * 19, "c", "n", "completed", "", 1, 0, "b", 1, "w", 1, 8, "v1", output, 3
    )
    return msgspec.structs.replace(made, finish_reason=finish_reason, **changes)


def request(**changes: Any) -> InferenceRequest:
    return read_messages(body(**changes), 100_000)


def joined_events(stream: bytes) -> dict[str, Any]:
    """The message that a client builds from the events."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in read_events(stream):
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                block["input"] = json.loads(inputs[event["index"]]) if inputs[event["index"]].endswith("}") else {}
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return message


def read_events(stream: bytes) -> Iterator[dict[str, Any]]:
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tools": st.lists(st.just({"type": "function", "function": {"name": "f"}}), min_size=1, max_size=3),
            "reasoning_effort": st.sampled_from(["low", "high"]),
            "response_format": st.just({"type": "json_object"}),
            "messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text()}), max_size=2),
        },
    ),
    st.integers(1, 200),
)
def test_the_joined_stream_is_the_whole_message(chat: dict[str, Any], size: int) -> None:
    """Whatever the server's lines are cut into, and whether they were a stream or one response."""
    whole = rich_chat(chat)
    usage = {"choices": [], "usage": whole["usage"]}
    lines = "".join(output_line(json.dumps(event).encode()) for event in (*rich_events(chat), usage))
    one_line = output_line(json.dumps(whole).encode())
    message = msgspec.to_builtins(message_of(reply(one_line), request(), "m"))
    for output in (lines, one_line):
        chunks = MessageChunks(message["id"], "m", request(), passed_on=True)
        deltas = b"".join(chunks.delta(output[at : at + size]) for at in range(0, len(output), size))
        stream = chunks.opening() + deltas + chunks.closing(reply(output)) + chunks.END

        assert joined_events(stream) == message
        assert msgspec.to_builtins(message_of(reply(output), request(), "m")) == message
    assert [block["type"] for block in message["content"]][-1:] == ["tool_use" if "tools" in chat else "text"]


def test_blocks_of_a_stream_follow_each_other() -> None:
    """Each block ends before the next one starts, and the message ends last. Generated text has one block."""
    chat = {"tools": [{"type": "function", "function": {"name": "f"}}] * 2, "reasoning_effort": "low"}
    lines = "".join(output_line(json.dumps(event).encode()) for event in rich_events(chat))
    chunks = MessageChunks(reply("").id, "m", request(), passed_on=True)
    names = [
        event["type"] for event in read_events(chunks.opening() + chunks.delta(lines) + chunks.closing(reply(lines)))
    ]
    block = ["content_block_start", "content_block_stop"]

    assert [name for name in names if name != "content_block_delta"] == [
        *("message_start", "ping"),
        *block * 3,
        *("message_delta", "message_stop"),
    ]
    plain = MessageChunks(reply("").id, "m", request(), passed_on=False)
    stream = plain.opening() + plain.delta("a") + plain.delta("b") + plain.closing(reply("ab", "length"))
    assert joined_events(stream) == msgspec.to_builtins(message_of(reply("ab", "length"), request(), "m"))
    assert joined_events(stream)["content"] == [{"type": "text", "text": "ab"}]


def answered(**choice: Any) -> dict[str, Any]:
    """The message for a response with this choice."""
    usage = choice.pop("usage", None)
    output = output_line(
        json.dumps({"choices": [{"index": 0, "message": {"content": "a"}} | choice], "usage": usage}).encode()
    )
    made: dict[str, Any] = msgspec.to_builtins(message_of(reply(output), request(stop_sequences=["END"]), "m"))
    return made


CALLS = {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("choice", "reason", "sequence"),
    [
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "content_filter"}, "refusal", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "stop_reason": 151_645}, "end_turn", None),
        ({"finish_reason": "tool_calls", "message": CALLS}, "tool_use", None),
        ({"finish_reason": "stop", "message": CALLS}, "tool_use", None),
        ({"finish_reason": "length", "message": CALLS}, "max_tokens", None),
    ],
)
def test_stop_reasons(choice: dict[str, Any], reason: str, sequence: str | None) -> None:
    """The reason of the server in Anthropic's terms, with the stop sequence where the server reports it."""
    message = answered(**choice)

    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, {"input_tokens": 5, "output_tokens": 3}),
        ({"prompt_tokens": 10, "completion_tokens": 4}, {"input_tokens": 10, "output_tokens": 4}),
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 8},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            {
                "input_tokens": 2,
                "output_tokens": 4,
                "cache_read_input_tokens": 8,
                "output_tokens_details": {"thinking_tokens": 2},
            },
        ),
    ],
)
def test_usage(usage: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    """Cached tokens are apart, as Anthropic counts them; without the server's counts those of the worker."""
    assert answered(usage=usage)["usage"] == expected


def test_calls_without_an_index() -> None:
    """Each call with a name is a block of its own."""
    content = MessageContent([])
    for function in ({"name": "f", "arguments": "{"}, {"arguments": "}"}, {"name": "g", "arguments": "{}"}):
        line = json.dumps({"choices": [{"delta": {"tool_calls": [{"function": function}]}}]})
        assert list(content.add_lines(line + "\n"))

    assert [block for block in content.blocks() if isinstance(block, ToolUseBlock)] == [
        ToolUseBlock("call_0", "f", {}),
        ToolUseBlock("call_1", "g", {}),
    ]


def late_call(index: int, **function: str) -> str:
    return json.dumps({"choices": [{"delta": {"tool_calls": [{"index": index, "function": function}]}}]}) + "\n"


def test_a_name_that_arrives_late() -> None:
    """The block starts with its name, and loses no arguments; a call without any name is kept until the end."""
    lines = late_call(0, arguments='{"q"') + late_call(1, arguments="{") + late_call(0, name="f", arguments=": 1")
    lines += late_call(0, arguments="}") + late_call(1, arguments="}")
    chunks = MessageChunks(reply("").id, "m", request(), passed_on=True)
    stream = chunks.opening() + chunks.delta(lines) + chunks.closing(reply(lines))
    message = message_of(reply(lines), request(), "m")

    assert message.content == [ToolUseBlock("call_0", "f", {"q": 1}), ToolUseBlock("call_1", "", {})]
    assert joined_events(stream) == msgspec.to_builtins(message)
    assert message.stop_reason == "tool_use"


def test_arguments_that_wait_for_a_name_are_bounded() -> None:
    """More of them are not held: the message ends with an error."""
    lines = late_call(0, arguments="x" * MAX_HELD_BYTES) + late_call(0, arguments="x")

    with pytest.raises(RequestError) as caught:
        message_of(reply(lines), request(), "m")
    assert caught.value.code is ErrorCode.INVALID_OUTPUT


def test_forms_of_some_servers() -> None:
    """Content in parts, and arguments that are an object."""
    message: Any = {"content": [{"type": "text", "text": "a"}], "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    message["tool_calls"][0]["function"]["arguments"] = {"q": 1}

    assert answered(message=message)["content"] == [
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"q": 1}},
    ]


def test_arguments_that_are_no_object_are_kept() -> None:
    """A call that was cut off is an input with the text of its arguments."""
    calls = {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"q": "a'}}]}

    assert answered(message=calls)["content"] == [
        {"type": "tool_use", "id": "c", "name": "f", "input": {"INVALID_JSON": '{"q": "a'}}
    ]


def test_a_line_that_cannot_be_read() -> None:
    """The response is an error; a stream goes on, and ends with the error."""
    output = '{"choices": [{"message": {"refusal": [1]}}]}\n{"choices": [{"message": {"content": "a"}}]}\n'
    chunks = MessageChunks(reply("").id, "m", request(), passed_on=True)

    assert b"text_delta" in chunks.delta(output)
    for failing in (lambda: message_of(reply(output), request(), "m"), lambda: chunks.closing(reply(output))):
        with pytest.raises(RequestError) as error:
            failing()
        assert error.value.code is ErrorCode.INVALID_OUTPUT


def test_types_of_errors() -> None:
    """Every code has a type of Anthropic's, by its status, and the code itself in the details."""
    kinds = {HTTP[code].status: error_body(RequestError(code), "req_1").error.type for code in ErrorCode}
    invalid = dict.fromkeys((400, 405, 408, 412, 415, 422, 499), "invalid_request_error")

    assert kinds == invalid | dict.fromkeys((500, 502), "api_error") | {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        409: "conflict_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
    error = RequestError(ErrorCode.INVALID_REQUEST, "no", "top_k")
    assert json.loads(msgspec.json.encode(error_body(error, "req_1"))) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "no",
            "details": {"error_code": "invalid_request", "param": "top_k"},
        },
        "request_id": "req_1",
    }


def test_header_lines() -> None:
    """The limits of requests and tokens as Anthropic's headers, and no others."""
    ours = (
        "x-ratelimit-limit-requests: 200\r\nx-ratelimit-limit-tokens: 1000\r\n"
        'RateLimit-Policy: "requests";q=200;w=1, "tokens";q=1000;qu="tokens";w=60\r\n'
        'RateLimit: "requests";r=199;t=1, "tokens";r=990;t=2, "concurrency";r=19, "day";r=9;t=3\r\n'
    )
    lines = dict(line.split(": ", 1) for line in header_lines("req_1", ours).splitlines())
    resets = [lines.pop(f"anthropic-ratelimit-{name}-reset") for name in ("requests", "tokens")]
    assert lines == {
        "request-id": "req_1",
        "anthropic-ratelimit-requests-limit": "200",
        "anthropic-ratelimit-requests-remaining": "199",
        "anthropic-ratelimit-tokens-limit": "1000",
        "anthropic-ratelimit-tokens-remaining": "990",
    }
    assert all(len(reset) == len("2026-01-01T00:00:00Z") and reset.endswith("Z") for reset in resets)
