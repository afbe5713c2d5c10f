"""Streams of endpoints: events as the standard defines them, and JSON that differs from OpenAI's format without harm."""

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.backends.openai_endpoint.errors import Broken, Busy, Lost, read_reported
from gpu_pool.backends.openai_endpoint.reading.answers import ReportedError, read_answer
from gpu_pool.backends.openai_endpoint.reading.event_stream import EventParser, StreamEvent
from gpu_pool.backends.openai_endpoint.reading.streamed import StreamedCompletion, StreamedDocument
from gpu_pool.backends.openai_endpoint.requests import counted_so_far
from scheduler.payload import Task

MANY = 1 << 20


def events_of(raw: bytes, size: int = MANY) -> list[tuple[str, str]]:
    """The events of a stream that arrives in parts of this size."""
    stream = EventParser(MANY)
    found = [event for at in range(0, len(raw), size) for event in stream.feed(raw[at : at + size])]
    return [(event.name.decode("utf-8", "replace"), event.data.decode("utf-8", "replace")) for event in found]


def by_the_standard(raw: bytes) -> list[tuple[str, str]]:
    """The same, step by step as section 9.2.6 of the HTML standard describes it."""
    text = raw.decode("utf-8", "replace").removeprefix("\ufeff")
    events: list[tuple[str, str]] = []
    name, data = "", ""
    for line in re.split("\r\n|\r|\n", text)[:-1]:
        field, _, value = line.partition(":")
        if not line:
            events += [(name, data[:-1])] if data not in ("", "\n") else []
            name, data = "", ""
        elif field == "data":
            data += value.removeprefix(" ") + "\n"
        elif field == "event":
            name = value.removeprefix(" ")
    return events


PIECES = (
    "data",
    ":",
    " ",
    "\r",
    "\n",
    "\r\n",
    "\n\n",
    "x",
    "event",
    'data: {"a": 1}\n\n',
    "\u00e9",
    "\ufeff",
    ": c\n",
    "id: 3\n",
)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25), st.integers(1, 40))
def test_events_are_those_of_the_standard(pieces: list[str], size: int) -> None:
    """Line ends, comments, byte order mark and fields without a colon, in parts of any size."""
    raw = "".join(pieces).encode()
    assert events_of(raw, size) == by_the_standard(raw)


def test_a_large_event_takes_time_and_memory_in_proportion() -> None:
    """Also if it comes in many small parts; one over the limit is an error before its end."""
    stream, part = EventParser(64 << 20), b"x" * 128
    began = time.process_time()
    stream.feed(b"data: ")
    assert not any(stream.feed(part) for _ in range(1 << 17))
    assert [len(event.data) for event in stream.feed(b"\n\n")] == [128 << 17]
    assert time.process_time() - began < 5  # Half an hour with a search from the start for each part.

    with pytest.raises(InvalidOutput):
        EventParser(1000).feed(b"data: " + b"x" * 1001)


def outputs(*data: Any, document: bool = False) -> tuple[ItemResult, StreamedCompletion]:
    """The result of a stream with these data of events: texts as they are, others as JSON."""
    stream = StreamedDocument() if document else StreamedCompletion()
    for each in data:
        stream.add(StreamEvent(b"", each.encode() if isinstance(each, str) else json.dumps(each).encode()))
    return stream.result(), stream


def piece(content: Any, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None, **more}]}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}
MILD = {
    "choices of null": ({"choices": None, "usage": USAGE},),
    "choices absent": ({"usage": USAGE},),
    "counts as floats": ({"choices": [], "usage": {name: float(count) for name, count in USAGE.items()}},),
    "end mark with white space": ({"choices": [], "usage": USAGE}, " [DONE] "),
    "no object": ({"choices": [], "usage": USAGE}, "keep-alive", "[]", "null", "7", '{"a'),
    "an error after the end": ({"choices": [], "usage": USAGE}, {"error": {"code": 500}}),
    "unknown events": ({"choices": [], "usage": USAGE}, {"metrics": {"choices": 1}}, {"choices": ["x", None]}),
    "a choice with odd members": ({"choices": [{"index": None, "delta": None, "finish_reason": 0}], "usage": USAGE},),
}


@pytest.mark.parametrize("document", [False, True])
@pytest.mark.parametrize("last", MILD.values(), ids=MILD)
def test_odd_events_do_not_fail_an_answer(last: tuple[Any, ...], *, document: bool) -> None:
    """The text has been delivered; the counts are used where they are counts."""
    result, stream = outputs(piece("a"), piece("b"), END, *last, document=document)

    assert (result.error_code, result.tokens_used, result.output_tokens, stream.over) == ("", 11, 3, True)
    assert result.output == "ab" or document


@pytest.mark.parametrize("task", [Task.CHAT, Task.CHAT_DOCUMENT])
@pytest.mark.parametrize(
    ("events", "tokens", "written"),
    [
        ([piece("a" * 40)], 12, 10),  # Not counted: a quarter of the bytes of input and output.
        ([piece("a" * 40), {"usage": {"prompt_tokens": 8}}], 18, 10),  # Without the output.
        ([piece("a" * 40), {"usage": {"prompt_tokens": None, "completion_tokens": 3}}], 5, 3),  # Without the input.
        ([piece("a" * 40), {"usage": USAGE}, piece("b" * 40)], 21, 13),  # The tokens of the later text are estimated.
        ([piece("a" * 40), {"usage": USAGE}, END], 11, 3),  # Nothing came.
        ([piece("a" * 40), {"usage": USAGE}, {"usage": {"prompt_tokens": 0, "completion_tokens": 0}}], 11, 3),
        ([piece("a" * 40), {"usage": {"completion_tokens": 10**12}}], 2**30 - 1, 2**30 - 1),  # As many as are charged.
        ([{"usage": {"prompt_tokens": 8, "completion_tokens": 0}}], 0, 0),  # Nothing was delivered.
        ([piece(""), {"usage": USAGE}], 0, 0),
        ([END], 2, 0),  # An empty answer.
    ],
)
def test_what_is_not_counted_is_estimated(events: list[Any], tokens: int, written: int, task: Task) -> None:
    """The last count of the server is used, and the text after it."""
    _, stream = outputs(*events, document=task is Task.CHAT_DOCUMENT)
    prompt = json.dumps({"messages": [{"role": "user", "content": "12345678"}]})

    result = counted_so_far(stream, Item(prompt if task is Task.CHAT_DOCUMENT else "12345678", task=task), "")

    assert (result.tokens_used, result.output_tokens) == (tokens, written)


def test_a_reason_without_text_ends_nothing() -> None:
    """Some servers send "" until the end: the second choice is not complete when the first one is."""
    both = [{"index": at, "delta": {"content": "a"}, "finish_reason": ""} for at in (0, 1)]
    _, stream = outputs({"choices": both}, END, document=True)
    assert not stream.over

    stream.add(StreamEvent(b"", json.dumps({"choices": [END["choices"][0] | {"index": 1}]}).encode()))
    assert stream.over


def texts_of(result: ItemResult) -> str:
    """The text of lines."""
    choices = [choice for line in result.output.splitlines() for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("document", [False, True])
@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (["\ud83d", "\ude00!"], "\U0001f600!"),
        (["a\ud83d", "", "\ude00"], "a\U0001f600"),
        (["\ud83d", "x"], "\ufffdx"),
        (["b\udc00", "x"], "b\ufffdx"),
        (["a", "\ud83d"], "a\ufffd"),
        (["\U0001f600"], "\U0001f600"),
    ],
)
def test_halves_of_a_character_are_joined_or_replaced(parts: list[str], text: str, *, document: bool) -> None:
    """RFC 8259, section 8.2: such escapes are valid JSON. A half that ends the text is replaced."""
    result, _ = outputs(*map(piece, parts), END, document=document)

    assert (texts_of(result) if document else result.output) == text


def test_texts_of_lists_and_bytes_that_are_no_text() -> None:
    """Some servers send content as a list of parts; bytes that are not UTF-8 are replaced."""
    stream = StreamedCompletion()
    stream.add(StreamEvent(b"", json.dumps(piece([{"type": "text", "text": "a"}])).encode()))
    stream.add(StreamEvent(b"", b'{"choices": [{"delta": {"content": "\xff"}}]}'))

    assert stream.result().output == "a\ufffd"


ERRORS = [
    ({"error": {"message": "m", "code": 400}}, "invalid_request"),
    ({"error": {"message": "m", "code": "400"}}, "invalid_request"),
    ({"error": {"message": "m", "type": "BadRequestError"}}, "invalid_request"),
    ({"object": "error", "message": "m", "type": "BadRequestError", "code": 400}, "invalid_request"),
    ({"error": {"message": "m", "type": "invalid_request_error", "code": None}}, "invalid_request"),
    ({"error": {"code": 429, "message": "m"}}, Busy),
    ({"error": {"type": "rate_limit_error", "message": "m"}}, Busy),
    ({"error": {"status": "UNAVAILABLE", "message": "m"}}, Busy),
    ({"error": {"code": 401, "message": "m"}}, Broken),
    ({"error": {"message": "sk-secret"}}, Lost),
    ({"error": "sk-secret"}, Lost),
    ({"error": {"code": 503.5}}, Busy),
    ({"error": {"code": 10**400}}, Lost),
]


@pytest.mark.parametrize("task", [Task.CHAT, Task.CHAT_DOCUMENT, Task.EMBED])
@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_an_error_in_a_response_of_200_is_that_of_its_status(error: dict[str, Any], expected: Any, task: Task) -> None:
    """As the first event of a stream, and as a whole response; the server's text is not quoted."""
    stream = StreamedDocument() if task is Task.CHAT_DOCUMENT else StreamedCompletion()
    for read in (
        lambda: stream.add(StreamEvent(b"", json.dumps(error).encode())),
        lambda: read_answer(json.dumps(error).encode(), [Item("a", task=task)]),
    ):
        with pytest.raises(ReportedError) as raised:
            read()
        found = read_reported(raised.value.document, tuple, 0.0)
        assert found.error_code == expected if isinstance(found, ItemResult) else type(found) is expected
        assert "sk-secret" not in repr(found)


def test_the_name_of_an_event_can_say_that_it_is_an_error() -> None:
    """Whatever its data are."""
    with pytest.raises(ReportedError):
        StreamedDocument().add(StreamEvent(b"error", b"out of memory"))


def test_a_whole_response_may_differ_from_the_format_too() -> None:
    """Counts as floats, a list as content, half a character."""
    message = {"role": "assistant", "content": [{"type": "text", "text": "a\ud83d"}], "tool_calls": None}
    body = json.dumps({"choices": [{"index": 0.0, "message": message}], "usage": {"prompt_tokens": 2.0}}).encode()

    assert read_answer(body, [Item("q", task=Task.CHAT)])[0].output == "a\ufffd"
    (result,) = read_answer(body, [Item("q", task=Task.CHAT_DOCUMENT)])
    assert json.loads(result.output)["usage"] == {"prompt_tokens": 2}
