"""Generated responses of engines: events and bodies, changed within JSON and within the standard for event streams.

Whatever an engine sends, the reader of the worker returns lines that every translation of the gateway can read.
"""

import copy
import json
import random
from typing import Any

import pytest

from gateway.api.format import TokenUsage
from gateway.translations.message_events import MessageContent
from gateway.translations.response_document import started
from gateway.translations.response_output import Output, output_events
from gateway.translations.responses import read_responses
from gpu_pool.backends.backend import InvalidOutput, Item
from gpu_pool.backends.openai_endpoint.reading.answers import read_answer
from gpu_pool.backends.openai_endpoint.reading.event_stream import EventParser
from gpu_pool.backends.openai_endpoint.reading.streamed import StreamedCompletion, StreamedDocument
from scheduler.chat_document import DOCUMENT, lines_of
from scheduler.chat_events import as_deltas, joined
from scheduler.payload import Task
from scheduler.request_id import new_request_id

SEEDS = 40
PER_SEED = 50
MOST = 1 << 20
ODD: list[Any] = [
    *(
        None,
        0,
        -1,
        8.0,
        8.5,
        1e400,
        "",
        [],
        {},
        "x",
        ["x"],
        {"a": 1},
        True,
        "\ud83d",
        "\ude00",
        "\u0000",
        10**30,
        [None],
    ),
    [{"type": "text", "text": "t"}],
]


def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": None} | more]}


def call(**function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": function}]}


DETAILS = {"prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens_details": None}
EVENTS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "hello "}, logprobs=None),
    chunk({"reasoning_content": "why"}),
    chunk(call(name="f", arguments='{"a"')),
    chunk(call(arguments=":1}")),
    chunk({}, finish_reason="stop"),
    {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 3} | DETAILS},
]
BODY = {
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi", "tool_calls": None}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2} | DETAILS,
}


def changed(draw: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """A copy with up to two members removed or replaced, at any depth."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2))):
        node: Any = document
        while True:
            name = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
            if isinstance(node[name], dict | list) and node[name] and draw.random() < 0.8:
                node = node[name]
                continue
            if isinstance(node, dict) and draw.random() < 0.2:
                del node[name]
            else:
                node[name] = copy.deepcopy(draw.choice(ODD))
            break
        if not document:
            break
    return document


def written(draw: random.Random, document: dict[str, Any]) -> bytes:
    """JSON with or without escapes, sometimes cut off."""
    data = json.dumps(document, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    return data[: draw.randrange(len(data))] if draw.random() < 0.02 else data


def framed(draw: random.Random) -> bytes:
    """A stream, with any line ends, comments, and a byte order mark or not."""
    end = draw.choice((b"\n", b"\r\n", b"\r"))
    events = [written(draw, changed(draw, event)) for event in EVENTS]
    events += draw.choice(([], [b"[DONE]"], [b" [DONE] "], [b""]))
    raw = b"\xef\xbb\xbf" if draw.random() < 0.1 else b""
    for event in events:
        raw += b": comment" + end if draw.random() < 0.1 else b""
        raw += b"data:" + (b" " if draw.random() < 0.7 else b"") + event + end + end
    return raw


def read(draw: random.Random, raw: bytes, stream: StreamedCompletion) -> str:
    """The output that is emitted while the stream comes in parts of any size."""
    parser, at, pieces = EventParser(MOST), 0, []
    while at < len(raw):
        size = draw.choice((1, 7, 64, 1000))
        pieces += [stream.add(event) for event in parser.feed(raw[at : at + size])]
        at += size
    return "".join(pieces)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_stream_fails_and_all_translations_read_it(seed: int) -> None:
    """What was emitted is the result; counts can be stored; lines are read by chats, messages and responses."""
    request = read_responses(b'{"model": "m", "input": "hi"}', 1000)
    for number in range(PER_SEED):
        draw = random.Random(seed * PER_SEED + number)
        raw = framed(draw)
        for stream in (StreamedCompletion(), StreamedDocument()):
            emitted = read(draw, raw, stream)
            result = stream.result()
            assert emitted == result.output
            emitted.encode()  # No half of a character.
            assert 0 <= result.output_tokens <= result.tokens_used < 2**31
        for line in lines_of(emitted):
            assert json.loads(line)
            as_deltas(line)
        joined(emitted)
        message = MessageContent([])
        list(message.add_lines(emitted))
        assert not message._unreadable
        document = started(new_request_id(), "m", request)
        assert list(output_events(document, Output(emitted, DOCUMENT, TokenUsage(1, 1, 2))))


@pytest.mark.parametrize("task", [Task.CHAT, Task.CHAT_DOCUMENT])
def test_a_whole_response_is_read_or_is_invalid(task: Task) -> None:
    """Nothing else is raised, and no text has half a character."""
    answers = 0
    for seed in range(SEEDS * PER_SEED):
        draw = random.Random(seed)
        try:
            (result,) = read_answer(written(draw, changed(draw, BODY)), [Item("q", task=task)])
        except InvalidOutput:
            continue
        answers += bool(result.output.encode())
    assert answers > SEEDS * PER_SEED / 2
