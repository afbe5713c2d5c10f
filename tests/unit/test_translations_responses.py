"""The Responses API: requests as chats, and outputs as items and events."""

import json
import random
from typing import Any

import msgspec
import pytest

from gateway.api.format import TokenUsage, missing_capability
from gateway.http.response import HttpResponse
from gateway.translations.response_document import ResponseDocument, started
from gateway.translations.response_handlers import page_of, stored_items
from gateway.translations.response_id import response_id
from gateway.translations.response_output import RESPONSES, Output, ResponseChunks, response_to, whole
from gateway.translations.responses import ResponsesRequest, read_responses, request_of
from response_events import events_of, joined
from scheduler.capabilities import Capability
from scheduler.chat_document import DOCUMENT
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.replies import Reply
from scheduler.request_id import new_request_id

MAX = 1_000_000
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "21"}
USER = {"role": "user", "content": "hi"}


def read(**fields: Any) -> ResponsesRequest:
    return read_responses(msgspec.json.encode({"model": "m", "input": "hi"} | fields), MAX)


def chat(**fields: Any) -> dict[str, Any]:
    """The body for the model's server."""
    document = read(**fields).document
    assert document is not None
    found: dict[str, Any] = msgspec.json.decode(document.input)
    return found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        (
            {"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9},
            {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9},
        ),
        ({"instructions": "Be brief."}, {"messages": [{"role": "system", "content": "Be brief."}, USER]}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "text"}}, "truncation": "disabled", "metadata": {"a": "b"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": None}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
                ],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        (
            {"input": [USER, {"type": "reasoning", "id": "r", "summary": []}, CALL, CALL | {"call_id": "c2"}, RESULT]},
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
                            for name in ("c1", "c2")
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "21"},
                ]
            },
        ),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "see"},
                            {"type": "input_image", "image_url": "data:,", "detail": "low"},
                            {"type": "input_file", "file_data": "data:,", "filename": "a"},
                        ],
                    }
                ]
            },
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "see"},
                            {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}},
                            {"type": "file", "file": {"file_data": "data:,", "filename": "a"}},
                        ],
                    }
                ]
            },
        ),
        (
            {
                "input": [
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "x", "annotations": []}],
                    },
                    USER,
                ]
            },
            {"messages": [{"role": "assistant", "content": "x"}, USER]},
        ),
    ],
)
def test_a_request_is_a_chat(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Each field becomes that of the chat, and fields without a value are left out."""
    assert chat(**fields) == {"messages": [USER]} | expected


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "1 to 10000 items"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "type `item_reference`"),
        ({"input": [{"type": ["message"]}]}, "input", "not supported"),
        ({"input": [USER] * 10_000, "instructions": "x"}, "input", "must have 1 to 10000 messages"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "data",
            r"`data` is required in `input\[0\]",
        ),
        ({"input": [{"type": "reasoning"}]}, "input", "only reasoning"),
        (
            {"input": [USER, {"type": "function_call", "name": "f"}]},
            "call_id",
            r"`call_id` is required in `input\[1\]`",
        ),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", r"`input\[0\]\.role`"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "image_url",
            "`image_url` is required",
        ),
        ({"input": "x" * (MAX + 1)}, "input", "`input` must not be larger"),
        ({"tools": [{"type": "file_search"}]}, "tools", "type `file_search`"),
        ({"tools": [{"type": "function"}]}, "name", r"`name` is required in `tools\[0\]`"),
        ({"tool_choice": "sometimes"}, "tool_choice", "`sometimes`"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "`file_search`"),
        ({"truncation": "auto"}, "truncation", "`truncation`"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "schema", "`schema` is required"),
        ({"text": {"verbosity": "huge"}}, "text", "`text.verbosity`"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning", "`reasoning.summary`"),
        ({"background": True, "store": False}, "store", "stored"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "id of a response"),
        ({"conversation": "conv_1"}, "conversation", "not known"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "at most 512"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ],
)
def test_rejections_name_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    """What is not supported or not valid is rejected by the name that the client used."""
    with pytest.raises(RequestError, match=message) as caught:
        read(**fields)

    assert caught.value.param == param


def test_capabilities_name_the_field() -> None:
    """The fields that need a capability are those of this format; so are the model's own errors."""
    body = read(
        input=[USER, CALL, RESULT],
        text={"format": {"type": "json_object"}},
        reasoning={"effort": "low"},
        top_logprobs=1,
    )
    assert body.document is not None
    refused = missing_capability(body.document, "m", frozenset({Capability.TOOLS, Capability.STRUCTURED_OUTPUT}))
    error = RESPONSES.bad_parameters("parameters.max_tokens must be at most 10.")

    assert body.document.needs == {
        Capability.TOOLS: "input",
        Capability.STRUCTURED_OUTPUT: "text",
        Capability.REASONING: "reasoning",
        Capability.LOGPROBS: "include",
    }
    assert refused is not None
    assert refused.param in ("reasoning", "include")
    assert (error.param, error.message) == ("max_output_tokens", "max_output_tokens must be at most 10.")


def test_hints_and_what_is_never_returned_have_no_effect() -> None:
    """Clients send them to each model."""
    fields = {"include": ["reasoning.encrypted_content"], "client_metadata": {"a": "b"}, "text": {"verbosity": "low"}}
    assert chat(**fields) == chat()
    assert chat(container=None, text={"format": {"type": "text"}, "other": []}) == chat()


PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits.",
    "format": {"type": "grammar", "definition": "start: A"},
}


def test_a_custom_tool_is_a_function_with_a_text() -> None:
    """Its grammar is in its description; calls and results of a conversation are those of the function."""
    history = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'x"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    found = chat(tools=[PATCH], input=[USER, *history], tool_choice={"type": "custom", "name": "patch"})
    stored = stored_items(read(input=[USER, *history]).original, ID)
    assert [item["id"].split("_")[0] for item in json.loads(stored)] == ["msg", "ctc", "ctco"]

    function = found["tools"][0]["function"]
    assert (function["name"], function["parameters"]["required"]) == ("patch", ["input"])
    assert function["description"] == "Edits.\n\n`input` must match this grammar:\nstart: A"
    assert found["tool_choice"] == {"type": "function", "function": {"name": "patch"}}
    call, result = found["messages"][1:]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"input": 'x"'}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "done"}


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"input": "a\\nb"}', "a\nb"), ("a b", "a b"), ('{"x": 1}', '{"x": 1}')]
)
def test_a_call_of_a_custom_tool_has_its_input(arguments: str, text: str) -> None:
    """As an item and as events. Arguments of another form are the input as they are."""
    request = read(tools=[PATCH, TOOL])
    output = lines(
        called(0, name="patch", arguments=arguments[:5]), called(0, arguments=arguments[5:]), called(1, name="f")
    )
    chunks = ResponseChunks(ID, "m", request, passed_on=True)
    written = chunks.opening() + chunks.delta(output) + chunks.closing(reply(output, DOCUMENT))
    events = events_of(written.decode())

    item, other = events[-1]["response"]["output"]
    assert (item["type"], item["call_id"], item["input"], other["type"]) == (
        "custom_tool_call",
        "c0",
        text,
        "function_call",
    )
    inputs = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
    assert [(each.get("delta"), each.get("input"), each["item_id"]) for each in inputs] == [
        (text, None, item["id"]),
        (None, text, item["id"]),
    ]


def test_tools_of_a_namespace_and_searches() -> None:
    """Tools of a namespace are offered beside the others, and a call names it; a search that OpenAI runs is left out."""
    agents = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}, PATCH]}
    tools = [TOOL, agents, {"type": "web_search", "external_web_access": True}]
    history = [{"type": "function_call", "call_id": "c", "name": "spawn", "namespace": "agents", "arguments": "{}"}]
    found = chat(tools=tools, input=[USER, *history])
    output = lines(called(0, name="spawn", arguments="{}"), called(1, name="f"), called(2, name="patch"))
    items = response_to(reply(output, DOCUMENT), "m", read(tools=tools)).output

    assert [tool["function"]["name"] for tool in found["tools"]] == [TOOL["name"], "spawn", "patch"]
    assert found["messages"][-1]["tool_calls"][0]["function"]["name"] == "spawn"
    assert [(item["type"], item.get("namespace")) for item in items] == [
        ("function_call", "agents"),
        ("function_call", None),
        ("custom_tool_call", "agents"),
    ]
    assert "tools" not in chat(tools=tools[2:], parallel_tool_calls=True)


def test_a_conversation_comes_before_the_input() -> None:
    """The items of earlier responses, as they were stored, are read as those of the input."""
    body = read(previous_response_id="resp_" + "0" * 32, instructions="Now").original
    history = json.loads(stored_items(read(input="one").original, "req_" + "0" * 32))
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]}
    document = request_of(body, [*history, answer], MAX).document

    assert history[0]["id"] == f"msg_{'0' * 32}_in0"
    assert document is not None
    assert [message["content"] for message in json.loads(document.input)["messages"]] == ["Now", "one", "two", "hi"]


def test_pages_of_items() -> None:
    """The newest first by default; an unknown item is a 404."""
    items = [{"id": str(number)} for number in range(5)]
    page = page_of(items, 2, "4", newest_first=True)

    assert ([item["id"] for item in page.data], page.has_more, page.last_id) == (["3", "2"], True, "2")
    assert page_of(items, 20, None, newest_first=False).data == items
    assert page_of([], 20, None, newest_first=True).first_id is None
    with pytest.raises(RequestError, match="`after`"):
        page_of(items, 2, "9", newest_first=True)


ID = new_request_id()
REQUEST = read()


def lines(*deltas: dict[str, Any], finish: str | None = "stop", **more: Any) -> str:
    """The output of a model's server, a line for each delta."""
    choices = [{"index": 0, "delta": delta} for delta in deltas]
    choices += [{"index": 0, "delta": {}, "finish_reason": finish}]
    return (
        "".join(json.dumps({"choices": [choice]}) + "\n" for choice in choices)
        + json.dumps({"choices": []} | more)
        + "\n"
    )


def reply(text: str, finish: str) -> Reply:
    return Reply(ID, "c", "n", "completed", "", 1, 0.0, "b", 1, "w", 0.0, 12, "v", text, 5, finish)


def document_of(text: str, finish: str = DOCUMENT) -> Any:
    found = whole(started(ID, "m", REQUEST), Output(text, finish, TokenUsage(7, 5, 12)))
    return json.loads(msgspec.json.encode(found))


def stream_of(text: str, finish: str = DOCUMENT, cuts: tuple[int, ...] = ()) -> list[Any]:
    """The events, of increments that end at `cuts`."""
    chunks = ResponseChunks(ID, "m", REQUEST, passed_on=finish == DOCUMENT)
    parts = [text[a:b] for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)]
    written = chunks.opening() + b"".join(map(chunks.delta, parts)) + chunks.closing(reply(text, finish)) + chunks.END
    return events_of(written.decode())


def called(index: int | None, **function: str) -> dict[str, Any]:
    place = {} if index is None else {"index": index}
    return {"tool_calls": [place | {"id": f"c{index}"} | {"function": function}]}


@pytest.mark.parametrize(
    ("text", "finish", "status", "shape"),
    [
        ("hello", "stop", "completed", ["message:hello"]),
        ("hel", "length", "incomplete", ["message:hel"]),
        ("", "stop", "completed", ["message:"]),
        (lines({"content": "a"}, {"content": "b"}), DOCUMENT, "completed", ["message:ab"]),
        (lines({"content": "a"}, finish="length"), DOCUMENT, "incomplete", ["message:a"]),
        (lines({"content": "a"}, finish="content_filter"), DOCUMENT, "incomplete", ["message:a"]),
        (lines({"refusal": "no"}), DOCUMENT, "completed", ["message:no"]),
        (lines({"content": "a"}, {"refusal": "no"}), DOCUMENT, "completed", ["message:ano"]),
        (lines({"reasoning": "why"}, {"content": "a"}), DOCUMENT, "completed", ["reasoning:why", "message:a"]),
        (
            lines({"content": "a"}, called(0, name="f", arguments=""), called(0, arguments="{}"), {"content": "b"}),
            DOCUMENT,
            "completed",
            ["message:a", "f({})", "message:b"],
        ),
        (
            lines(called(0, name="f"), called(1, name="g"), called(0, arguments="1"), called(1, arguments="2")),
            DOCUMENT,
            "completed",
            ["f(1)", "g(2)"],
        ),
        (
            lines(called(None, name="f", arguments="1"), called(None, name="g", arguments="2")),
            DOCUMENT,
            "completed",
            ["f(1)", "g(2)"],
        ),
        (lines(), DOCUMENT, "completed", ["message:"]),
        (
            json.dumps({"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}) + "\n",
            DOCUMENT,
            "completed",
            ["message:a"],
        ),
    ],
)
def test_items(text: str, finish: str, status: str, shape: list[str]) -> None:
    """The items of an output, whole and streamed, and the status of the response."""
    document = document_of(text, finish)

    assert (document["status"], [shape_of(item) for item in document["output"]]) == (status, shape)
    assert joined(stream_of(text, finish)) == document
    assert document["id"] == response_id(ID)


def shape_of(item: Any) -> str:
    if item["type"] == "function_call":
        return f"{item['name']}({item['arguments']})"
    return f"{item['type']}:" + "".join(part.get("text", part.get("refusal")) for part in item["content"])


def test_details_of_an_odd_server_are_left_out() -> None:
    """Log probabilities and usage details in a form of their own do not fail the response."""
    choice = {"delta": {"content": "a"}, "finish_reason": "stop"}
    for logprobs in (1, {"content": 1}, {"content": ["a"]}, {"content": [{"token": "a", "top_logprobs": 1}]}):
        text = json.dumps({"choices": [choice | {"logprobs": logprobs}], "usage": {"prompt_tokens_details": 1}}) + "\n"
        assert document_of(text)["status"] == "completed"


def test_details_of_the_usage() -> None:
    """Those of the model's server, with the tokens that were counted."""
    details = {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 2}}
    document = document_of(lines({"content": "a"}, usage={"prompt_tokens": 7, "completion_tokens": 5} | details))

    assert document["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }


@pytest.mark.parametrize("seed", range(200))
def test_events_add_up_to_the_whole_response(seed: int) -> None:
    """For any order of deltas, and wherever the increments end."""
    pick = random.Random(seed)
    token = {"token": "x", "logprob": -1.0, "bytes": None, "top_logprobs": []}
    makers = (
        lambda: {"content": pick.choice(["", "a", "é\u2028"])},
        lambda: {"reasoning_content": "why "},
        lambda: {"refusal": "no"},
        lambda: called(pick.choice([0, 1, 2]), name="f", arguments=pick.choice(["", '{"a"'])),
        lambda: called(None, name=pick.choice(["f", ""]), arguments="1"),
    )
    choices = [{"index": pick.choice([0, 0, 1]), "delta": pick.choice(makers)()} for _ in range(pick.randint(0, 12))]
    for choice in choices:
        choice |= {"logprobs": {"content": [token]}} if pick.random() < 0.3 else {}
    choices.append({"index": 0, "delta": {}, "finish_reason": pick.choice(["stop", "length", "tool_calls"])})
    text = "".join(json.dumps({"choices": [choice]}, ensure_ascii=False) + "\n" for choice in choices)
    cuts = tuple(sorted(pick.sample(range(len(text)), min(5, len(text)))))
    events = stream_of(text, cuts=cuts)

    assert joined(events) == events[-1]["response"] == document_of(text)


def test_a_failed_stream() -> None:
    """It ends with the failed response, which has the output so far, then with the error."""
    chunks = ResponseChunks(ID, "m", REQUEST, passed_on=False)
    error = {"message": "Lost.", "param": None, "code": ErrorCode.WORKER_LOST, "request_id": ID}
    written = chunks.opening() + chunks.delta("hel") + chunks.failure(HttpResponse.of(503, {"error": error}))
    *_, failed, last = events_of(written.decode())

    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "Lost.", "type": "worker_lost"}
    assert shape_of(failed["response"]["output"][0]) == "message:hel"
    assert (last["type"], last["message"], last["error"]["code"]) == ("error", "Lost.", "worker_lost")


def test_a_response_repeats_its_request() -> None:
    """The members of the response that are those of the request, with OpenAI's defaults."""
    body = read(tools=[TOOL], tool_choice="required", metadata={"a": "b"}, user="me", text={"format": {"type": "text"}})
    document: ResponseDocument = started(ID, "m", body)

    assert (document.tools, document.tool_choice, document.metadata, document.user) == (
        [TOOL],
        "required",
        {"a": "b"},
        "me",
    )
    assert (document.store, document.text, document.truncation) == (True, {"format": {"type": "text"}}, "disabled")
    assert (started(ID, "m", REQUEST).tool_choice, document.parallel_tool_calls) == ("auto", True)
