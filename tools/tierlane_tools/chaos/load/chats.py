"""The load on a stack with an engine: chats and texts of 1 to 200 tokens, streamed or not. Some clients leave early.

Form, length and the time of leaving are drawn from the nonce, so that each try of a request is the same. The output shows
whether any token is lost, doubled, or of another request.
"""

import asyncio
import json
from random import Random
from typing import NamedTuple, cast

import msgspec

from scheduler.errors import http_status
from tierlane_tools.bench.http_client import BenchResponse, Pending, header
from tierlane_tools.chaos.faults.engine import MODEL, output_text
from tierlane_tools.chaos.load.messages import (
    NONCE_CHARACTERS,
    OK_STATUS,
    UNKNOWN_OWNER,
    AnswerError,
    AnswerReading,
    post_bytes,
)
from tierlane_tools.chaos.load.requests import ChaosLoad, LoadRequest, LoadTry

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
MOST_TOKENS = 200
LEAVING_SHARE = 0.08
LEAVES_WITHIN_S = 1.0
EVENT, DONE = b"data: ", b"[DONE]"


class _Content(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    message: _Content = _Content()
    delta: _Content = _Content()


class _Document(msgspec.Struct):
    """The fields of a response, or of an event of a stream."""

    choices: list[_Choice] = []
    error: AnswerError | None = None


_decoder = msgspec.json.Decoder(_Document)


class Form(NamedTuple):
    """What one request asks for. `leaves_s`: after which its client leaves; None: it stays."""

    is_chat: bool
    is_stream: bool
    tokens: int
    leaves_s: float | None


def form_of(nonce: str) -> Form:
    """The form of the request with this nonce."""
    random = Random(f"{nonce}/form")
    leaves = random.random() < LEAVING_SHARE
    return Form(
        random.random() < 0.7,
        random.random() < 0.5,
        random.randint(1, MOST_TOKENS),
        random.uniform(0.0, LEAVES_WITHIN_S) if leaves else None,
    )


def chat_body(form: Form, text: str) -> bytes:
    """The body of a request with this text."""
    content = {"messages": [{"role": "user", "content": text}]} if form.is_chat else {"prompt": text}
    return json.dumps({"model": MODEL, **content, "max_tokens": form.tokens, "stream": form.is_stream}).encode()


def read_chat(response: BenchResponse, text: str, tokens: int) -> AnswerReading:
    """Parse a response to the request with the text `text`. A stream that ends with an error has the status of the error."""
    try:
        if (header(response.head, b"content-type") or b"").startswith(b"text/event-stream"):
            events = [line.removeprefix(EVENT) for line in response.body.split(b"\n") if line.startswith(EVENT)]
            documents = [_decoder.decode(event) for event in events if event != DONE]
            ended = events[-1:] == [DONE]
        else:
            documents, ended = [_decoder.decode(response.body)], True
    except (msgspec.MsgspecError, UnicodeDecodeError):
        documents, ended = [], False
    error = next((each.error for each in documents if each.error), None)
    output = "".join(
        (choice.text or choice.message.content or choice.delta.content or "")
        for each in documents
        for choice in each.choices
    )
    expected = output_text(text, tokens)
    own = output == expected and ended if error is None else expected.startswith(output)
    status = response.status
    if error is not None and status == OK_STATUS and own:  # Otherwise it is a response with a foreign text.
        status = http_status(error.code)
    return AnswerReading(
        status=status,
        code=error.code if error else "",
        id=(header(response.head, b"x-request-id") or b"").decode("latin-1"),
        owner=(text[:NONCE_CHARACTERS] if own else UNKNOWN_OWNER) if status == OK_STATUS else "",
        replayed=header(response.head, b"idempotent-replayed") == b"true",
        begun=error is not None and bool(output),
    )


class ChatLoad(ChaosLoad):
    """The load of one run."""

    def _encode(self, pending: Pending) -> bytes:
        form = form_of(cast("LoadTry", pending).request.nonce)
        if form.leaves_s is not None:
            asyncio.get_running_loop().call_later(form.leaves_s, self._leave, pending)
        return super()._encode(pending)

    def _leave(self, pending: Pending) -> None:
        request = cast("LoadTry", pending).request
        request.has_left = True
        self._pools[request.gateway].abandon(pending)
        request.has_left = False  # It was answered before.

    def _bytes(self, request: LoadRequest, host: str, trace: str) -> bytes:
        form = form_of(request.nonce)
        path = CHAT_PATH if form.is_chat else TEXT_PATH
        return post_bytes((path, chat_body(form, request.text)), host, request.customer, trace, request.key)

    def _reading(self, request: LoadRequest, response: BenchResponse) -> AnswerReading:
        return read_chat(response, request.text, form_of(request.nonce).tokens)
