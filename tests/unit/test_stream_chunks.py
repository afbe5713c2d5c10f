"""Events of a passed-on chat: lines of a model's server with the members of the gateway."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from endpoint_stand_in import rich_events
from gateway.api.stream_chunks import DocumentChunks, chat_chunks
from scheduler.chat_document import output_line, usual_members

ID = "req_01a22269590574fdade48428b619e449"
DELTA = '{"index":0,"delta":{"content":"a"},"finish_reason":null}'


def chunks(*, usage: bool = False, choices: int = 1) -> DocumentChunks:
    document = SimpleNamespace(choices=choices)
    request: Any = SimpleNamespace(service_tier=None, include_usage=usage, document=document)
    found = chat_chunks(ID, "m", request, True)
    assert isinstance(found, DocumentChunks)
    return found


def documents(events: bytes) -> list[dict[str, Any]]:
    assert events.endswith(b"\n\n") or not events
    return [json.loads(each.removeprefix(b"data: ")) for each in events.split(b"\n\n")[:-1]]


@pytest.mark.parametrize(
    ("line", "members"),
    [
        (f'{{"choices":[{DELTA}]}}', f'"choices":[{DELTA}]'),
        (f'{{"choices":[{DELTA}],"usage":null}}', f'"choices":[{DELTA}]'),
        (f'{{"system_fingerprint":"f","choices":[{DELTA}]}}', f'"system_fingerprint":"f","choices":[{DELTA}]'),
        ('{"choices":[{"text":"\\"usage\\":"}]}', '"choices":[{"text":"\\"usage\\":"}]'),
        ('{"choices":[{"text":"é"}],"x":{"usage":null}}', None),
        (f'{{"choices":[{DELTA}],"usage":{{"prompt_tokens":1}}}}', None),
        (f'{{"usage":null,"choices":[{DELTA}]}}', None),
        (f'{{"x":{{"choices":[{DELTA}]}},"choices":[]}}', None),
        (f'{{"choices":[{DELTA}],"us\\u0061ge":null}}', None),
        ('{"choices":[{"index":0,"message":{"content":"a"}}]}', None),
        ('{"choices":[],"usage":{"prompt_tokens":1}}', None),
        ("", None),
    ],
)
def test_usual_lines_are_not_decoded(line: str, members: str | None) -> None:
    """A line with usage or messages is decoded, as is one whose members cannot be told without that."""
    assert usual_members(line) == members


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(
    "body", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}], "n": 2}, {"logprobs": True}]
)
@pytest.mark.parametrize("size", [1, 50, 100_000])
def test_events_of_a_server_become_the_gateways(body: dict[str, Any], usage: bool, size: int) -> None:
    """Each has the gateway's id, time, model and tier beside the server's members, however the lines are cut."""
    sent = [*rich_events(body), {"choices": [], "usage": {"prompt_tokens": 3}}]
    lines = "".join(output_line(json.dumps(event | {"usage": event.get("usage")}).encode()) for event in sent)
    made = chunks(usage=usage, choices=body.get("n", 1))

    events = b"".join(made.delta(lines[at : at + size]) for at in range(0, len(lines), size))
    last = documents(made.closing(SimpleNamespace()))  # type: ignore[arg-type]  # the server's usage is known

    own = {"id": ID, "object": "chat.completion.chunk", "model": "m", "service_tier": "default"}
    own |= {"usage": None} if usage else {}
    found = documents(events)
    assert found == [{**event, **own, "created": found[0]["created"]} for event in sent[:-1]]
    assert [each["usage"] for each in last] == ([{"prompt_tokens": 3}] if usage else [])


ROLE, TEXT = {"role": "assistant"}, {"content": "a"}


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ([{**ROLE, "content": ""}, TEXT], [{**ROLE, "content": ""}, TEXT]),
        ([TEXT, TEXT], [ROLE | TEXT, TEXT]),
        ([ROLE | TEXT, ROLE | TEXT, {**ROLE, "content": '"role"'}], [ROLE | TEXT, TEXT, {"content": '"role"'}]),
        ([{}], [ROLE]),
    ],
)
@pytest.mark.parametrize("choices", [1, 2])
def test_the_role_is_in_one_event_of_each_choice(
    sent: list[dict[str, Any]], received: list[dict[str, Any]], choices: int
) -> None:
    """Whether the server sends it at first, never or always: OpenAI's client joins the roles of all events."""
    made = chunks(choices=choices)
    found: dict[int, list[dict[str, Any]]] = {}
    for delta in sent:
        for index in range(choices):
            line = json.dumps({"choices": [{"index": index, "delta": delta}], "usage": None}) + "\n"
            (event,) = documents(made.delta(line))
            found.setdefault(index, []).append(event["choices"][0]["delta"])
    assert found == dict.fromkeys(range(choices), received)


def test_an_event_of_several_lines_is_one_line() -> None:
    """A server may write JSON with line ends."""
    event = json.dumps({"id": "x", "choices": [{"delta": {"content": "a\nb"}}], "x": [1, {}]}, indent=1)
    line = output_line(event.encode())
    assert line.count("\n") == 1
    assert json.loads(line) == {"choices": [{"delta": {"content": "a\nb"}}], "x": [1, {}]}
