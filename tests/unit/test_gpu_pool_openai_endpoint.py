"""`openai:URL` without I/O: addresses, request bodies, responses, streams, errors, and the policy of a batch."""

import base64
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from configs import endpoint_access
from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.backends.openai_endpoint.availability import Failures, Pauses
from gpu_pool.backends.openai_endpoint.errors import LOADING, Broken, Busy, read_refusal, retry_after_s
from gpu_pool.backends.openai_endpoint.messages import MissingBody, body_of, is_unusual, rejected_early
from gpu_pool.backends.openai_endpoint.reading.answers import MOST_TOKENS, read_answer
from gpu_pool.backends.openai_endpoint.settings import EndpointUrl, read_address
from gpu_pool.config import VARIABLE, take_access
from scheduler.errors import StartError
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages

CHAT = Item(
    encode_messages([PromptMessage("developer", "Be brief."), PromptMessage("user", "Hi")]), {"seed": 1}, Task.CHAT
)


class Listener:
    """A listener that accepts no text."""

    gone = late = False

    def emit(self, offset: int, text: str) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("spec", "url"),
    [
        ("openai:http://h:8000", EndpointUrl("http://h:8000/v1", "http://h:8000", "")),
        ("openai:https://h/#org/m-7b", EndpointUrl("https://h/v1", "https://h", "org/m-7b")),
        ("openai:http://[::1]:80/x", EndpointUrl("http://[::1]:80/x", "http://[::1]:80/x", "")),
        ("openai:http://engine_1.svc.", EndpointUrl("http://engine_1.svc./v1", "http://engine_1.svc.", "")),
    ],
)
def test_address(spec: str, url: EndpointUrl) -> None:
    """A base URL as OpenAI clients use it, and a model after #."""
    assert read_address(spec) == url


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("openai:ftp://h/v1", "must begin with http"),
        ("openai:http://", "names no host"),
        ("openai:http://engine..svc:8000/v1", "host name is not valid"),
        ("openai:http://%s.svc/v1" % ("e" * 64), "host name is not valid"),
        ("openai:http://an engine/v1", "host name is not valid"),
        ("oip:http://.svc#m", "host name is not valid"),
        ("openai:http://h:port/v1", "Port could not be cast"),
        ("openai:http://h:0/v1", "must not be 0"),
        ("openai:http://h/v1?key=hunter2", "must not have a query"),
        ("openai:http://h/v1?key=hunter2@x", "must not have a query"),
        ("openai:http://me:hunter2@h/v1", "TIERLANE_ENDPOINT_API_KEY"),
    ],
)
def test_invalid_address(spec: str, fault: str) -> None:
    """The error never contains a password or key."""
    with pytest.raises(StartError, match=r"^Backend ") as caught:
        read_address(spec)
    assert fault in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_access_is_removed_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes of the model do not get the key, and its repr does not show it."""
    access = endpoint_access("sk-secret", connect_ms=7)
    assert list(access.environment()) == [VARIABLE]
    monkeypatch.setenv(VARIABLE, access.environment()[VARIABLE])

    assert take_access() == access
    assert VARIABLE not in os.environ
    assert "sk-secret" not in repr(access)


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (Item("a", {"model": "other"}), "parameters.model is not known to this model."),
        (Item("a", {"stream": True, "n": 2}), "parameters.n is not known to this model."),
        (Item("no conversation", task=Task.CHAT), "The stored request cannot be read."),
        (CHAT, None),
    ],
)
def test_items_that_must_not_be_sent(item: Item, sentence: str | None) -> None:
    """Clients may set sampling parameters only."""
    result = rejected_early(item)

    assert (result and (result.output, result.error_code)) == (sentence and (sentence, "invalid_request"))


@pytest.mark.parametrize(
    ("task", "body", "unusual"),
    [
        (Task.CHAT_DOCUMENT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}, False),
        (Task.CHAT_DOCUMENT, {"messages": [{"role": "user", "content": []}]}, True),
        (Task.CHAT_DOCUMENT, {"messages": [{"role": "user", "content": "a"}], "tools": []}, True),
        (Task.COMPLETION_DOCUMENT, {"prompt": "a", "seed": 3}, False),
        (Task.COMPLETION_DOCUMENT, {"prompt": "a", "echo": True}, True),
        (Task.COMPLETE, {}, False),
    ],
)
def test_unusual_requests(task: Task, body: dict[str, Any], unusual: bool) -> None:
    """Their invalid output is no strike against the model: they have more than texts and sampling parameters."""
    assert is_unusual(Item(json.dumps(body), task=task)) is unusual


def test_the_fields_of_an_embedding_are_in_its_body() -> None:
    """As the client sent them."""
    assert json.loads(body_of("m", [Item("a", {"dimensions": 2}, Task.EMBED)]).begin) == {
        "model": "m",
        "input": "a",
        "encoding_format": "float",
        "dimensions": 2,
    }


def read(document: Any, *items: Item) -> list[ItemResult]:
    return read_answer(json.dumps(document).encode(), items)


def test_responses_are_ordered_by_index() -> None:
    """Tokens are divided by length; a finish reason other than `length` is `stop`; an invalid vector fails alone."""
    choices = [
        {"index": 1, "text": "yyy", "finish_reason": "eos_token"},
        {"index": 0, "text": "x", "finish_reason": "length"},
    ]
    usage = {"prompt_tokens": 4, "completion_tokens": 6}
    odd = {"choices": choices[1:], "usage": {"prompt_tokens": 10**30, "completion_tokens": -1}}
    rows = [{"index": 0, "embedding": [1, 0.5]}, {"index": 1, "embedding": []}]

    texts = read({"choices": choices, "usage": usage, "more": 1}, Item("a"), Item("b"))
    good, bad = read({"data": rows, "usage": None}, Item("a", task=Task.EMBED), Item("b", task=Task.EMBED))

    assert texts == [ItemResult("x", 4, "", 2, "length"), ItemResult("yyy", 6, "", 4, "stop")]
    assert struct.unpack("<2f", base64.b64decode(good.output)) == (1.0, 0.5)
    assert bad.error_code == "invalid_output"
    assert read(odd, Item("a"))[0].tokens_used == MOST_TOKENS


@pytest.mark.parametrize(
    "document",
    [
        "It works!",
        {"choices": [{"index": 0, "text": "x"}]},
        {"choices": [{"index": 0, "text": "x"}, {"index": 0, "text": "y"}]},
        {"choices": [{"index": 0, "text": "x"}, {"index": 2, "text": "y"}]},
        {"choices": [{"index": 0, "text": "x"}, {"index": 1, "text": 7}]},
    ],
)
def test_malformed_responses_are_invalid_output(document: Any) -> None:
    """Junk, wrong counts and wrong indexes fail the call."""
    with pytest.raises(InvalidOutput):
        read(document, Item("a"), Item("b"))


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"Retry-After": "2"}, 2.0),
        ({"Retry-After": "0"}, 0.05),
        ({"Retry-After": "inf"}, 30.0),
        ({"Retry-After": "-1"}, None),
        ({"Retry-After": "nan"}, None),
        ({"retry-after-ms": "250", "Retry-After": "1"}, 0.25),
        ({"Retry-After": "Thu, 01 Jan 1970 00:16:45 GMT"}, 5.0),
    ],
)
def test_retry_after(headers: dict[str, str], wait_s: float | None) -> None:
    """Seconds, milliseconds or a date, limited to 0.05..30 s; now is second 1000."""
    assert retry_after_s(headers, 1000.0) == wait_s


def error_of(status: int, error: Any = "", sent: tuple[str, ...] = ()) -> Any:
    return read_refusal(status, {}, json.dumps(error).encode(), lambda: sent, 0.0)


def test_status_codes() -> None:
    """Busy, misconfigured endpoint, server failure, or error of the client."""
    assert [error_of(status) for status in (429, 503)] == [Busy(None), Busy(None)]
    assert all(isinstance(error_of(status), Broken) for status in (301, 401, 403, 404, 405))
    assert (error_of(401).key, error_of(403).key) == (True, False)
    assert error_of(503, {"error": {"code": 503, "message": "Loading model"}}) == Broken(LOADING, certain=True)
    assert [error_of(status).by_input for status in (408, 500, 502, 504)] == [False, True, False, False]
    codes = [error_of(status).error_code for status in (400, 413, 418, 422)]
    assert codes == ["invalid_request", "request_too_large", "invalid_request", "invalid_request"]


@pytest.mark.parametrize(
    "error",
    [
        {"detail": "Server is pinned to '/models/b'; requested 'a'."},
        {"error": {"message": "Invalid model: a", "code": "model_not_found"}},
        {"error": "Request for unknown model: 'a' is not found"},
        {"error": {"message": "The model `a` does not exist."}},
    ],
)
def test_rejected_name_of_the_model(error: Any) -> None:
    """A check shows whether it is that of the endpoint: transformers 5.24, infinity 0.0.78, Triton and others use 400."""
    assert error_of(400, error) == Broken("The endpoint answers 400.")


GENERIC = "The model does not accept this request."


@pytest.mark.parametrize(
    ("error", "sent", "sentence"),
    [
        ({"error": {"message": "m", "param": "top_p"}}, (), "parameters.top_p is not accepted by the model."),
        ({"detail": [{"loc": ["body", "seed"], "msg": "m"}]}, (), "parameters.seed is not accepted by the model."),
        ({"error": "`stop` must hold 4"}, ("stop",), "parameters.stop is not accepted by the model."),
        ({"error": {"message": "do stop saying sk-1"}}, (), GENERIC),
        (
            {"error": "unsupported content[].type"},
            ("messages", "file"),
            "parameters.file is not accepted by the model.",
        ),
        (
            {"error": {"message": '"auto" tool choice requires --enable-auto-tool-choice'}},
            ("messages", "temperature", "tools"),
            "parameters.tools is not accepted by the model.",
        ),
        ({"detail": "prompt must be a string."}, ("prompt", "seed"), "parameters.prompt is not accepted by the model."),
        ({"error": {"message": "At most 0 image(s) may be provided"}}, ("messages", "text"), GENERIC),
        ({"error": {"message": "sk-secret in /srv/x", "param": "prompt"}}, (), GENERIC),
        ("<html>", (), GENERIC),
        ({"error": None, "detail": 7}, (), GENERIC),
    ],
)
def test_client_errors_do_not_quote_the_server(error: Any, sent: tuple[str, ...], sentence: str) -> None:
    """The server's own text may contain secrets."""
    assert error_of(400, error, sent).output == sentence


def test_failures_for_what_the_server_does_not_support() -> None:
    """They are the client's, if the request has it: llama.cpp answers 500 to an image that its model cannot read."""
    error = {"error": {"code": 500, "message": "image input is not supported", "type": "server_error"}}

    found = error_of(500, error, ("messages", "image_url"))
    assert (found.error_code, found.output) == ("invalid_request", "parameters.image_url is not accepted by the model.")
    assert error_of(500, error, ("messages",)).by_input


def test_pauses_grow_until_a_batch_succeeds() -> None:
    """The wait that the server names is used as it is."""
    pauses = Pauses()
    waits = [pauses.busy_s(requested) for requested in (None, None, 7.0, None, None, None, None, None)]
    assert waits == [0.25, 0.5, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert [pauses.probe_s() for _ in range(6)] == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0]
    pauses.worked()
    assert (pauses.busy_s(None), pauses.probe_s()) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("customers", "of_several"), [([1, 1, 1], False), ([1, 1, 2], True), ([0, 0, 0], True), ([1, 0, 1], True)]
)
def test_failures_of_several_customers_are_the_servers(customers: list[int], *, of_several: bool) -> None:
    """Three in a row, of customers that are different or unknown; an answer starts anew."""
    failures = Failures()
    assert [failures.lost(customer) for customer in customers] == [False, False, True]
    assert (failures.of_several, failures.refused(1), failures.refused(2)) == (of_several, False, True)
    failures.worked()
    assert (failures.lost(customers[0]), failures.refused(1)) == (False, False)


@pytest.mark.parametrize(
    ("waits_s", "brief"),
    [
        ([1.6], [False]),
        ([30.0, 0.25], [False, False]),
        ([0.25, 0.5, 1.0], [True, True, False]),
        ([1.0, None, 1.0, 0.5, 0.05], [True, True, True, False]),
    ],
)
def test_brief_pauses(waits_s: list[float | None], brief: list[bool]) -> None:
    """At most 1.5 s in all since the last answer (None), in one pause or several."""
    pauses, found = Pauses(), list[bool]()
    for wait_s in waits_s:
        if wait_s is None:
            pauses.worked()
        else:
            found.append(pauses.brief(wait_s))

    assert found == brief


def test_a_chat_that_is_passed_on_is_not_parsed(tmp_path: Path) -> None:
    """The fields of the worker stand before those of the client, whose chat comes from the request or from its file."""
    name, document = "req_" + "0" * 32, '{"messages": [ ], "beams":1}'
    (tmp_path / name).write_text(document)
    for text in (document, name):
        item = Item(text, {"max_tokens": 5, "priority": 9}, Task.CHAT_DOCUMENT)
        parts = body_of("m", [item], str(tmp_path), stream=True)
        body = parts.begin + b"".join(parts.chat.pieces(1, 9) if parts.chat is not None else ())
        assert len(body) == parts.size
        assert body.endswith(document[1:].encode())
        options = {"stream": True, "stream_options": {"include_usage": True}}
        assert json.loads(body) == {"model": "m", "priority": 9, "messages": [], "beams": 1, **options}
    for directory in ("", str(tmp_path / "other")):
        with pytest.raises(MissingBody):
            body_of("m", [Item(name, {}, Task.CHAT_DOCUMENT)], directory)
