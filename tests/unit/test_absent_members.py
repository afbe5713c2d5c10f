"""Members that ask for nothing are no reason to reject a body."""

import json
from typing import Any

import pytest

from gateway.api.chat import read_chat
from gateway.api.completions import read_completion
from gateway.translations.messages import read_messages
from scheduler.errors import RequestError

LIMIT = 1 << 20
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "m", "messages": HI}


def document(**fields: Any) -> Any:
    """The chat that is passed on."""
    form = read_chat(json.dumps(CHAT | fields).encode(), LIMIT).document
    assert form is not None
    assert form.needs == {}
    return json.loads(form.text)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": None, "tool_choice": None},
        {"functions": [], "function_call": "none"},
        {"thinking": None, "plugins": [], "extra": {}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream": True, "stream_options": {"include_usage": True, "other": 1}},
    ],
)
def test_members_without_effect_need_nothing_and_do_not_reach_a_server(fields: dict[str, Any]) -> None:
    """Servers reject some of them: an empty list of tools, a choice of tools without any."""
    assert document(**fields).keys() - CHAT.keys() == set()


def test_messages_of_other_servers_are_sent_back() -> None:
    """Members of messages that are not known are passed on as they are; null ones are nothing."""
    answers = [
        {"role": "assistant", "content": "x", "reasoning_details": [{"type": "reasoning.text", "text": "x"}]},
        {"role": "assistant", "content": "x", "id": "msg_1", "provider_specific_fields": None},
        {"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}},
    ]
    assert document(messages=[*HI, *answers])["messages"] == [*HI, *answers]
    assert document(max_tokens=5, max_completion_tokens=5)["max_tokens"] == 5
    with pytest.raises(RequestError, match="not both"):
        document(max_tokens=5, max_completion_tokens=6)


def test_sixteen_stops_are_accepted() -> None:
    """As at the other endpoints."""
    assert len(document(stop=[f"s{n}" for n in range(16)])["stop"]) == 16
    with pytest.raises(RequestError, match="16"):
        document(stop=["s"] * 17)


@pytest.mark.parametrize("value", [None, [], {}])
def test_absent_members_of_a_body_of_another_format_are_ignored(value: Any) -> None:
    """Also in lists of objects; with a value they are rejected by name."""
    body = {
        "model": "m",
        "max_tokens": 4,
        "messages": [HI[0] | {"x": value}, HI[0]],
        "container": value,
        "mcp_servers": [],
    }

    assert read_messages(json.dumps(body).encode(), LIMIT).model == "m"
    with pytest.raises(RequestError) as raised:
        read_messages(json.dumps(body | {"container": "c"}).encode(), LIMIT)
    assert raised.value.param == "container"


def test_many_absent_members_are_rejected() -> None:
    """Each would cost a pass over the body."""
    body = {"model": "m", "max_tokens": 4, "messages": HI} | {f"x{n}": None for n in range(40)}
    with pytest.raises(RequestError):
        read_messages(json.dumps(body).encode(), LIMIT)


def test_a_completion_too() -> None:
    """Null under an unknown name needs no capability."""
    assert read_completion(b'{"model": "m", "prompt": "a", "guided_json": null}', LIMIT).document is None
