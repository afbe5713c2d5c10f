"""Streams in OpenAI's format: each event is a chunk of a completion or of a chat.

A chunk contains what is new: added text, then the reason of the end, then, if the client requested it, the usage.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceRequest, TokenUsage, usage
from gateway.auth.service_tier import response_tier
from gateway.http.response import HttpResponse, encode_json
from scheduler.chat_document import usual_members
from scheduler.chat_events import ASSISTANT, as_deltas, with_role_once
from scheduler.protocol.replies import Reply
from scheduler.request_id import created_ms


def event(json: bytes) -> bytes:
    """One event."""
    return b"data: " + json + b"\n\n"


class TextDelta(msgspec.Struct, gc=False):
    """The text added to a completion."""

    text: str
    index: int = 0
    logprobs: None = None
    finish_reason: str | None = None


class Delta(msgspec.Struct, gc=False):
    """The text added to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, gc=False):
    """The message that is extended."""

    delta: Delta
    index: int = 0
    logprobs: None = None
    finish_reason: str | None = None


class CompletionChunk(msgspec.Struct, gc=False):
    """One event of a completion. `usage` is null except in the last event, and absent if the client did not request it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextDelta]
    usage: TokenUsage | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, gc=False):
    """One event of a chat. `usage` is null except in the last event, and absent if the client did not request it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    service_tier: str
    usage: TokenUsage | UnsetType | None = UNSET


class Chunks:
    """The events of one stream, in order: `opening`, `delta` for each piece of text, `closing` and `END`, or `failure`."""

    END = b"data: [DONE]\n\n"
    """The last event of a complete stream."""

    def __init__(self, request_id: str, model: str, request: InferenceRequest) -> None:
        self._id = request_id
        self._created = created_ms(request_id) // 1000
        self._model = model
        self._tier = response_tier(request.service_tier)
        self._no_usage = None if request.include_usage else UNSET

    def opening(self) -> bytes:
        """Sent before the first of the other events, possibly nothing."""
        return b""

    def delta(self, text: str) -> bytes:
        """More text."""
        return self._chunk(text)

    def closing(self, reply: Reply) -> bytes:
        """The reason of the end, and the usage."""
        last = self._chunk(None, reply.finish_reason)
        return last if self._no_usage is UNSET else last + self._event([], usage([reply]))

    def failure(self, response: HttpResponse) -> bytes:
        """The error that ends the stream. `response`: the response for it."""
        return event(response.body)

    def _chunk(self, text: str | None, finish_reason: str | None = None) -> bytes:
        raise NotImplementedError

    def _event(self, choices: list[Any], tokens: TokenUsage | UnsetType | None) -> bytes:
        raise NotImplementedError


MakeChunks = Callable[[str, str, InferenceRequest, bool], Chunks]
"""From request id, model, request, and whether the output is lines of a model's server."""


class CompletionChunks(Chunks):
    """The stream of `/v1/completions`."""

    def _chunk(self, text: str | None, finish_reason: str | None = None) -> bytes:
        return self._event([TextDelta(text or "", finish_reason=finish_reason)], self._no_usage)

    def _event(self, choices: list[Any], tokens: TokenUsage | UnsetType | None) -> bytes:
        chunk = CompletionChunk(self._id, "text_completion", self._created, self._model, choices, tokens)
        return event(encode_json(chunk))


def completion_chunks(request_id: str, model: str, request: InferenceRequest, passed_on: bool) -> Chunks:  # noqa: FBT001
    """The stream of `/v1/completions`."""
    if passed_on:
        return DocumentChunks(request_id, model, request, {"object": "text_completion"})
    return CompletionChunks(request_id, model, request)


def chat_chunks(request_id: str, model: str, request: InferenceRequest, passed_on: bool) -> Chunks:  # noqa: FBT001
    """The stream of `/v1/chat/completions`."""
    return (ChatDocumentChunks if passed_on else ChatChunks)(request_id, model, request)


class ChatChunks(Chunks):
    """The stream of `/v1/chat/completions` for generated text. The first chunk has the role."""

    _role: str | UnsetType = ASSISTANT

    def _chunk(self, text: str | None, finish_reason: str | None = None) -> bytes:
        delta, self._role = Delta(self._role, UNSET if text is None else text), UNSET
        return self._event([ChatDelta(delta, finish_reason=finish_reason)], self._no_usage)

    def _event(self, choices: list[Any], tokens: TokenUsage | UnsetType | None) -> bytes:
        kind: Literal["chat.completion.chunk"] = "chat.completion.chunk"
        return event(encode_json(ChatChunk(self._id, kind, self._created, self._model, choices, self._tier, tokens)))


class DocumentChunks(Chunks):
    """A stream from the lines of a model's server. Increments may end within a line. `own`: the gateway's members of each."""

    def __init__(self, request_id: str, model: str, request: InferenceRequest, own: Mapping[str, str]) -> None:
        super().__init__(request_id, model, request)
        self._rest = ""
        self._usage: msgspec.Raw | None = None
        self._own = {"id": request_id, "created": self._created, "model": model, **own}
        self._begin = b"data: " + encode_json(self._own)[:-1] + b","
        self._end = b"}\n\n" if self._no_usage is UNSET else b',"usage":null}\n\n'

    def delta(self, text: str) -> bytes:
        """The events of the lines that are complete now."""
        *lines, self._rest = (self._rest + text).split("\n")
        return b"".join(self._line(line) for line in lines if line)

    def closing(self, reply: Reply) -> bytes:
        """The usage, if the client requested it: the server's, else the counted tokens."""
        if self._no_usage is UNSET:
            return b""
        tokens = usage([reply]) if self._usage is None else self._usage
        return event(encode_json({**self._own, "choices": [], "usage": tokens}))

    def _line(self, line: str) -> bytes:
        written = usual_members(line)
        if written is not None:
            return self._begin + written.encode() + self._end
        members = as_deltas(line)
        counted = members.pop("usage", None)
        if counted is not None and bytes(counted) != b"null":
            self._usage = counted
        if bytes(members.get("choices", b"[]")) == b"[]":
            return b""
        no_usage = {} if self._no_usage is UNSET else {"usage": None}
        return event(encode_json({**self._own, **members, **no_usage}))


class ChatDocumentChunks(DocumentChunks):
    """The stream of `/v1/chat/completions` from these lines. The first chunk of each choice has its role."""

    def __init__(self, request_id: str, model: str, request: InferenceRequest) -> None:
        own = {"object": "chat.completion.chunk", "service_tier": response_tier(request.service_tier)}
        super().__init__(request_id, model, request, own)
        self._without_role = set(range(1 if request.document is None else request.document.choices))

    def _line(self, line: str) -> bytes:
        if self._without_role or '"role"' in line:
            line = with_role_once(line, self._without_role)
        return super()._line(line)
