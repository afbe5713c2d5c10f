"""Anthropic's Messages as a chat in OpenAI's format, and the response back: content, reasons, tokens, errors, headers."""

import json
from typing import Any

import pytest

from gateway.api.format import missing_capability
from gateway.translations.message_endpoints import MESSAGES
from gateway.translations.messages import MAX_STOPS, read_messages, read_prompt
from scheduler.capabilities import Capability
from scheduler.errors import RequestError

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "weather", "description": "now", "input_schema": {"type": "object"}}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}, "description": "now"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"q": "é"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"q":"é"}'}}
FOUND = {
    "type": "search_result",
    "source": "docs/queues.md",
    "title": "Queues",
    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    "citations": {"enabled": True},
}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "s"}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def body(**changes: Any) -> bytes:
    fields = {"model": "m", "max_tokens": 9, "messages": HELLO} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def document(**changes: Any) -> dict[str, Any]:
    """The chat for the model's server, without the fields that are always there."""
    found = read_messages(body(**changes), 100_000).document
    assert found is not None
    chat: dict[str, Any] = json.loads(found.input)
    assert chat.pop("max_tokens") == 9
    return chat


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"system": "s"}, [{"role": "system", "content": "s"}, *HELLO]),
        ({"system": [text("a")]}, [{"role": "system", "content": "a"}, *HELLO]),
        ({"system": [text("a"), text("b")]}, [{"role": "system", "content": [text("a"), text("b")]}, *HELLO]),
        ({"messages": [{"role": "user", "content": []}]}, [{"role": "user", "content": ""}]),
        ({"messages": [{"role": "system", "content": "s"}, *HELLO]}, [{"role": "system", "content": "s"}, *HELLO]),
        (
            {"messages": [{"role": "user", "content": [text("a") | {"cache_control": {"type": "ephemeral"}}, PNG]}]},
            [{"role": "user", "content": [text("a"), PART]}],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]},
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "title": "t", "source": PDF}]}]},
            [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "file",
                            "file": {"filename": "t", "file_data": "data:application/pdf;base64,AAAA"},
                        }
                    ],
                }
            ],
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [THINKING, text("a"), text("b")]}]},
            [*HELLO, {"role": "assistant", "content": "ab"}],
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [THINKING, USE]}]},
            [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}],
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c1", "content": [text("a"), PNG, text("b")]},
                            {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
                            {"type": "tool_result", "tool_use_id": "c3"},
                            text("go on"),
                        ],
                    }
                ]
            },
            [
                {"role": "tool", "tool_call_id": "c1", "content": "a\nb"},
                {"role": "tool", "tool_call_id": "c2", "content": "Error: no"},
                {"role": "tool", "tool_call_id": "c3", "content": ""},
                {"role": "user", "content": [PART, text("go on")]},
            ],
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c1", "content": [FOUND]},
                            {
                                "type": "tool_result",
                                "tool_use_id": "c2",
                                "content": [{"type": "tool_reference", "tool_name": "weather"}],
                            },
                            FOUND,
                        ],
                    }
                ]
            },
            [
                {"role": "tool", "tool_call_id": "c1", "content": "Queues (docs/queues.md)\na\nb"},
                {"role": "tool", "tool_call_id": "c2", "content": "weather"},
                {"role": "user", "content": "Queues (docs/queues.md)\na\nb"},
            ],
        ),
    ],
)
def test_messages_of_the_chat(changes: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    """System, blocks of each kind, and the history of tool calls."""
    assert document(**changes) == {"messages": expected}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9},
            {"stop": ["x"], "temperature": 0.5, "top_p": 0.9},
        ),
        ({"top_k": 5}, {"top_k": 5}),
        ({"tools": [TOOL]}, {"tools": [{"type": "function", "function": FUNCTION}]}),
        ({"tools": [], "tool_choice": {"type": "auto"}}, {}),
        ({"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}, "service_tier": "standard_only"}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 4095}}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, {"reasoning_effort": "medium"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 16_384}}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, {}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
    ],
)
def test_options_of_the_chat(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    """Sampling, tools, thinking and the format of the output."""
    assert document(**changes) == {"messages": HELLO} | expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        (
            {"type": "tool", "name": "weather"},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
)
def test_choice_of_tools(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    """Each of Anthropic's choices has its counterpart."""
    chat = document(tools=[TOOL], tool_choice=choice)

    assert {name: value for name, value in chat.items() if name not in ("messages", "tools")} == expected


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [PNG]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [PNG | {"source": {"type": "file", "file_id": "f"}}]}]}, "messages"),
        ({"stop_sequences": ["x"] * (MAX_STOPS + 1)}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop": ["x"]}, "stop"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"speed": "fast"}, "speed"),
        ({"system": "s" * 100_001}, "messages"),
    ],
)
def test_invalid_bodies(changes: dict[str, Any], param: str) -> None:
    """The error names the client's field."""
    with pytest.raises(RequestError) as error:
        read_messages(body(**changes), 100_000)

    assert error.value.param == param


@pytest.mark.parametrize(
    ("changes", "capability", "field"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, Capability.REASONING, "thinking"),
        ({"output_config": {"effort": "low"}}, Capability.REASONING, "output_config"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            Capability.STRUCTURED_OUTPUT,
            "output_config",
        ),
        ({"tools": [TOOL]}, Capability.TOOLS, "tools"),
        ({"messages": [{"role": "user", "content": [PNG]}]}, Capability.IMAGES, "messages"),
    ],
)
def test_needed_capabilities(changes: dict[str, Any], capability: Capability, field: str) -> None:
    """A capability that the model lacks is named with the client's field."""
    found = read_messages(body(**changes), 100_000).document
    assert found is not None
    error = missing_capability(found, "m", frozenset())

    assert dict(found.needs) == {capability: field}
    assert error is not None
    assert error.param == field
    assert error.message == f"`{field}` needs the capability `{capability}`, which the model `m` does not have."


def test_errors_of_the_model_name_the_client_field() -> None:
    """Its sentence about a parameter is in Anthropic's terms."""
    error = MESSAGES.bad_parameters("parameters.stop must not be empty.")

    assert (error.param, error.message) == ("stop_sequences", "stop_sequences must not be empty.")


def test_a_prompt_to_count_needs_no_limit() -> None:
    """The fields of the output are unknown there."""
    assert read_prompt(body(max_tokens=None), 1000).document is not None
    with pytest.raises(RequestError, match="max_tokens"):
        read_prompt(body(), 1000)
