"""What an endpoint is sent, and what is made of what it says: addresses, bodies, answers, events, refusals."""

import base64
import json
import struct
from typing import Any

import pytest

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.backends.openai_endpoint.errors import Broken, Busy, Lost, asked_wait_s, read_refusal
from gpu_pool.backends.openai_endpoint.messages import (
    EventLines,
    StreamedCompletion,
    StreamFault,
    body_of,
    read_answer,
    refused_early,
    shares,
    together,
)
from gpu_pool.backends.openai_endpoint.settings import EndpointUrl, read_address
from scheduler.errors import StartError
from scheduler.payload import PromptMessage, Task, encode_messages

CHAT = Item(
    encode_messages([PromptMessage("developer", "Be brief."), PromptMessage("user", "Hi")]), {"seed": 1}, Task.CHAT
)


class Reader:
    """A listener that nobody tells anything."""

    gone = late = False

    def say(self, offset: int, text: str) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("spec", "address"),
    [
        ("openai:http://h:8000/v1", EndpointUrl("http://h:8000/v1", "http://h:8000", "")),
        ("openai:http://h:8000", EndpointUrl("http://h:8000/v1", "http://h:8000", "")),
        ("openai:https://h/#org/m-7b", EndpointUrl("https://h/v1", "https://h", "org/m-7b")),
        ("openai:https://h/proxy/v1/#m", EndpointUrl("https://h/proxy/v1", "https://h/proxy", "m")),
        ("openai:http://[::1]:80/x", EndpointUrl("http://[::1]:80/x", "http://[::1]:80/x", "")),
    ],
)
def test_an_address_is_taken_apart(spec: str, address: EndpointUrl) -> None:
    """A URL as OpenAI's clients take it, and a model behind #."""
    assert read_address(spec) == address


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("openai:", "must begin with http"),
        ("openai:localhost:8000", "must begin with http"),
        ("openai:ftp://h/v1", "must begin with http"),
        ("openai:http://", "names no host"),
        ("openai:http://h:port/v1", "Port could not be cast"),
        ("openai:http://h:0/v1", "must not be 0"),
        ("openai:http://h/v1?key=hunter2", "must not have a query"),
        ("openai:http://h/v1?key=hunter2@x", "must not have a query"),
        ("openai:http://me:hunter2@h/v1", "TIERLANE_ENDPOINT_API_KEY"),
    ],
)
def test_a_bad_address_is_named(spec: str, fault: str) -> None:
    """One sentence, which shows no password."""
    with pytest.raises(StartError, match=r"^Backend ") as caught:
        read_address(spec)
    assert fault in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_text_a_list_a_conversation_and_embeddings_have_their_bodies() -> None:
    """One text is sent as one, several as a list; the template's roles are those that open models know."""
    texts = [Item("a", {"max_tokens": 3}), Item("b", {"max_tokens": 3})]
    vectors = [Item("a", task=Task.EMBED), Item("b", task=Task.EMBED)]

    assert body_of("m", texts[:1]) == {"model": "m", "max_tokens": 3, "prompt": "a"}
    assert body_of("m", texts) == {"model": "m", "max_tokens": 3, "prompt": ["a", "b"]}
    assert body_of("m", vectors) == {"model": "m", "input": ["a", "b"], "encoding_format": "float"}
    assert body_of("m", [CHAT], stream=True) == {
        "model": "m",
        "seed": 1,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_equal_parameters_go_together() -> None:
    """Texts of one call share their parameters; conversations and streams have a call each."""
    items = [
        Item("a", {"seed": 1, "top_p": 0.5}),
        Item("b", {"seed": 2}),
        CHAT,
        Item("c", {"top_p": 0.5, "seed": 1}),
        Item("d", task=Task.EMBED),
        Item("e", {"seed": 2}, listener=Reader()),
        Item("f", task=Task.EMBED),
        CHAT,
    ]

    assert together(items, range(8), lists=True) == [[0, 3], [1], [2], [4, 6], [5], [7]]
    assert together(items, [0, 3, 4], lists=False) == [[0], [3], [4]]


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (Item("a", {"temperature": 0.5, "top_k": 3}), None),
        (Item("a", {"priority": 9}), "parameters.priority is not known to this model."),
        (Item("a", {"model": "other"}), "parameters.model is not known to this model."),
        (Item("a", {"stream": True, "n": 2}), "parameters.n is not known to this model."),
        (Item("no conversation", task=Task.CHAT), "The stored request cannot be read."),
        (CHAT, None),
    ],
)
def test_what_must_not_be_sent_ends_before(item: Item, sentence: str | None) -> None:
    """Callers choose how their text is made, and nothing else of the call."""
    found = refused_early(item)

    assert (found and found.output) == sentence
    assert found is None or found.error_code == "invalid_request"


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        (10, [1, 1], [5, 5]),
        (10, [1, 2], [3, 7]),
        (1, [1, 1, 1], [0, 0, 1]),
        (0, [3, 4], [0, 0]),
        (7, [5], [7]),
        (3, [], []),
    ],
)
def test_tokens_of_a_call_are_shared_out(total: int, weights: list[int], parts: list[int]) -> None:
    """None is lost or made."""
    assert shares(total, weights) == parts


def answered(document: Any, *items: Item) -> list[ItemResult]:
    return read_answer(json.dumps(document).encode(), items)


def test_answers_are_ordered_by_their_numbers() -> None:
    """And tokens go to each by length; a reason other than `length` is the model's own end."""
    choices = [
        {"index": 1, "text": "yyy", "finish_reason": "eos_token"},
        {"index": 0, "text": "x", "finish_reason": "length"},
    ]
    usage = {"prompt_tokens": 4, "completion_tokens": 6}

    found = answered({"choices": choices, "usage": usage, "more": 1}, Item("a"), Item("b"))

    assert found == [ItemResult("x", 4, "", 2, "length"), ItemResult("yyy", 6, "", 4, "stop")]


def test_vectors_become_outputs() -> None:
    """A vector that is none fails alone."""
    rows = [{"index": 0, "embedding": [1, 0.5]}, {"index": 1, "embedding": []}]

    good, bad = answered({"data": rows, "usage": None}, Item("a", task=Task.EMBED), Item("b", task=Task.EMBED))

    assert struct.unpack("<2f", base64.b64decode(good.output)) == (1.0, 0.5)
    assert bad.error_code == "invalid_output"


@pytest.mark.parametrize(
    "document",
    [
        "It works!",
        None,
        {},
        {"choices": []},
        {"choices": [{"index": 0, "text": "x"}]},
        {"choices": [{"index": 0, "text": "x"}, {"index": 0, "text": "y"}]},
        {"choices": [{"index": 0, "text": "x"}, {"index": 2, "text": "y"}]},
        {"choices": [{"index": 0, "text": "x"}, {"index": 1}]},
        {"choices": [{"index": 0, "text": "x"}, {"index": 1, "text": 7}]},
        {"choices": [{"index": 0, "text": "x"}, {"index": 1, "text": "\ud800"}]},
    ],
)
def test_what_is_no_answer_is_told(document: Any) -> None:
    """Junk and wrong counts: which answer belongs to whom cannot be known."""
    with pytest.raises(InvalidOutput):
        answered(document, Item("a"), Item("b"))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_come_in_any_parts(size: int) -> None:
    """A letter's bytes and a line's end may be in two parts; comments and other fields are no data."""
    raw = ': ping\r\n\r\nevent: x\r\ndata: {"ä": 1}\r\n\r\ndata:two\ndata: lines\n\n\n\ndata: [DONE]\n\ndata: rest'.encode()
    lines = EventLines()

    found = [event for start in range(0, len(raw), size) for event in lines.feed(raw[start : start + size])]

    assert found == ['{"ä": 1}'.encode(), b"two\nlines", b"[DONE]"]


def test_an_event_without_an_end_is_junk() -> None:
    """It would fill the memory."""
    lines = EventLines()
    lines.feed(b"data: " + b"x" * (4 << 19))
    with pytest.raises(InvalidOutput):
        lines.feed(b"x" * (5 << 19))


def test_a_growing_answer_is_whole_with_its_reason() -> None:
    """Pieces of texts and messages, empty ones and tokens in between; over before the mark of the end."""
    growing = StreamedCompletion()
    assert growing.add(b'{"choices": [{"delta": {"role": "assistant", "content": null}}]}') == ""
    assert growing.add(b'{"choices": [{"delta": {"content": "ab"}}]}') == "ab"
    assert (growing.add(b'{"choices": [{"text": "c", "finish_reason": "length"}]}'), growing.length) == ("c", 3)
    assert growing.over
    assert not growing.ended
    growing.add(b'{"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}')
    growing.add(b"[DONE]")

    assert growing.ended
    assert growing.result() == ItemResult("abc", 5, "", 3, "length")


def test_an_error_in_a_stream_is_told_apart_from_junk() -> None:
    """The server's own words stay here."""
    with pytest.raises(StreamFault, match="in the middle"):
        StreamedCompletion().add(b'{"error": {"message": "sk-secret"}}')
    with pytest.raises(InvalidOutput, match="cannot be read"):
        StreamedCompletion().add(b"<html>")


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"Retry-After": "2"}, 2.0),
        ({"Retry-After": "0"}, 0.05),
        ({"Retry-After": "900"}, 30.0),
        ({"Retry-After": "inf"}, 30.0),
        ({"Retry-After": "-1"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "soon"}, None),
        ({"retry-after-ms": "250", "Retry-After": "1"}, 0.25),
        ({"Retry-After": "Thu, 01 Jan 1970 00:16:45 GMT"}, 5.0),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:01 GMT"}, 0.05),
    ],
)
def test_a_wait_is_read_and_bounded(headers: dict[str, str], wait_s: float | None) -> None:
    """Seconds, milliseconds or a date; now is second 1000."""
    assert asked_wait_s(headers, 1000.0) == wait_s


def refusal(status: int, error: Any = "", sent: tuple[str, ...] = ()) -> Any:
    return read_refusal(status, {}, json.dumps(error).encode(), sent, 0.0)


def test_a_status_says_whose_fault_it_is() -> None:
    """The moment's, ours, the server's, the caller's."""
    assert [refusal(status) for status in (429, 503)] == [Busy(None), Busy(None)]
    assert all(isinstance(refusal(status), Broken) for status in (301, 401, 403, 404, 405))
    assert (refusal(401).key, refusal(403).key) == (True, False)
    assert [refusal(status).by_input for status in (408, 500, 502, 504)] == [False, True, False, False]
    assert isinstance(refusal(502), Lost)
    codes = [refusal(status).error_code for status in (400, 413, 418, 422)]
    assert codes == ["invalid_request", "request_too_large", "invalid_request", "invalid_request"]


@pytest.mark.parametrize(
    ("error", "sent", "sentence"),
    [
        ({"error": {"message": "m", "param": "top_p"}}, (), "parameters.top_p is not accepted by the model."),
        ({"detail": [{"loc": ["body", "seed"], "msg": "m"}]}, (), "parameters.seed is not accepted by the model."),
        (
            {"error": "`stop` must hold 4", "error_type": "validation"},
            ("stop",),
            "parameters.stop is not accepted by the model.",
        ),
        ({"error": {"message": "do stop saying sk-1"}}, (), "The model does not accept this request."),
        (
            {"message": "This model's maximum context length is 4096 tokens"},
            ("max_tokens",),
            "The input and the tokens that are asked for are more than the model can hold.",
        ),
        (
            {"error": {"message": "sk-secret in /srv/x", "param": "prompt"}},
            (),
            "The model does not accept this request.",
        ),
        ("<html>", (), "The model does not accept this request."),
        ([1], (), "The model does not accept this request."),
        ({"error": None, "detail": 7}, (), "The model does not accept this request."),
    ],
)
def test_a_caller_gets_a_sentence_and_never_the_server_s_own(error: Any, sent: tuple[str, ...], sentence: str) -> None:
    """Each form of error that servers have; what they wrote may hold secrets."""
    assert refusal(400, error, sent).output == sentence
