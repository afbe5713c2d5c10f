"""Chats and texts of the chaos load: forms by nonce, and what a response shows about its owner."""

import json

import pytest
from engine.calls import output_text as output_of_engine

from tierlane_tools.bench.http_client import BenchResponse
from tierlane_tools.chaos.faults.engine import output_text
from tierlane_tools.chaos.load.chats import MOST_TOKENS, form_of, read_chat
from tierlane_tools.chaos.load.messages import UNKNOWN_OWNER

NONCE = "0123456789abcdef"
TEXT = f"{NONCE}:1.000000:xx"
TOKENS = 5
OUTPUT = output_text(TEXT, TOKENS)
HEAD = b"HTTP/1.1 200 OK\r\nx-request-id: req_1\r\ncontent-type: %b"
LOST = {"error": {"code": "worker_lost"}}


def streamed(*documents: object) -> BenchResponse:
    """A stream with these events."""
    events = [each if isinstance(each, str) else json.dumps(each) for each in documents]
    body = "".join(f"data: {each}\n\n" for each in events).encode()
    return BenchResponse(200, HEAD % b"text/event-stream", body, keep_alive=True)


def delta(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def whole(document: object, status: int = 200) -> BenchResponse:
    return BenchResponse(status, HEAD % b"application/json", json.dumps(document).encode(), keep_alive=True)


def test_the_output_is_that_of_the_engine() -> None:
    """For a text with any characters and each length."""
    assert [output_text("é", n) for n in (1, 2, 200)] == [output_of_engine("é", n) for n in (1, 2, 200)]


def test_a_nonce_has_one_form() -> None:
    """All kinds occur, and each try of a request is the same."""
    forms = [form_of(f"{number:016x}") for number in range(300)]

    assert forms == [form_of(f"{number:016x}") for number in range(300)]
    assert {(form.is_chat, form.is_stream) for form in forms} == {(a, b) for a in (True, False) for b in (True, False)}
    assert 1 <= min(form.tokens for form in forms) < max(form.tokens for form in forms) <= MOST_TOKENS
    assert 0 < sum(form.leaves_s is not None for form in forms) < 60


@pytest.mark.parametrize(
    ("response", "status", "code", "owner", "begun"),
    [
        (streamed(delta(OUTPUT[:9]), delta(OUTPUT[9:]), "[DONE]"), 200, "", NONCE, False),
        (whole({"choices": [{"text": OUTPUT}]}), 200, "", NONCE, False),
        (whole({"choices": [{"message": {"content": OUTPUT}}]}), 200, "", NONCE, False),
        (whole({"choices": [{"text": OUTPUT + " 6"}]}), 200, "", UNKNOWN_OWNER, False),
        (streamed(delta(OUTPUT)), 200, "", UNKNOWN_OWNER, False),
        (streamed(delta(OUTPUT[:9]), delta(OUTPUT[10:]), "[DONE]"), 200, "", UNKNOWN_OWNER, False),
        (streamed(LOST), 503, "worker_lost", "", False),
        (streamed(delta(OUTPUT[:9]), LOST), 503, "worker_lost", "", True),
        (streamed(delta("another"), LOST), 200, "worker_lost", UNKNOWN_OWNER, True),
        (whole(LOST, 503), 503, "worker_lost", "", False),
        (streamed("no JSON"), 200, "", UNKNOWN_OWNER, False),
    ],
)
def test_responses(response: BenchResponse, status: int, code: str, owner: str, *, begun: bool) -> None:
    """A whole output belongs to its request; a begin of it may be followed by an error, and nothing else may."""
    found = read_chat(response, TEXT, TOKENS)

    assert (found.status, found.code, found.owner, found.begun) == (status, code, owner, begun)
    assert found.id == "req_1"
