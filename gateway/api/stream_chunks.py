"""Streams in OpenAI's format: each event is a chunk of a completion or of a chat.

A chunk contains what is new: added text, then the reason of the end, then, if the client requested it, the usage.
"""

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceRequest, TokenUsage, usage
from gateway.auth.service_tier import response_tier
from gateway.http.response import HttpResponse, encode_json
from scheduler.protocol.replies import Reply
from scheduler.request_id import created_ms

DONE = b"data: [DONE]\n\n"
"""The last event of a complete stream."""


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

    END = DONE

    def __init__(self, request_id: str, model: str, request: InferenceRequest) -> None:
        self._id = request_id
        self._created = created_ms(request_id) // 1000
        self._model = model
        self._tier = response_tier(request.service_tier)
        self._no_usage = None if request.include_usage else UNSET

    def opening(self) -> bytes:
        """Sent when the stream starts, possibly nothing."""
        return b""

    def delta(self, text: str) -> bytes:
        """More text."""
        return self._chunk(text)

    def closing(self, reply: Reply) -> bytes:
        """The reason of the end, and the usage."""
        last = self._chunk(None, reply.finish_reason)
        return last if self._no_usage is UNSET else last + self._usage_chunk(usage([reply]))

    def failure(self, response: HttpResponse) -> bytes:
        """The error that ends the stream. `response`: the response for it."""
        return event(response.body)

    def _chunk(self, text: str | None, finish_reason: str | None = None) -> bytes:
        raise NotImplementedError

    def _usage_chunk(self, tokens: TokenUsage) -> bytes:
        raise NotImplementedError


MakeChunks = Callable[[str, str, InferenceRequest], Chunks]
"""From request id, model and request."""


class CompletionChunks(Chunks):
    """The stream of `/v1/completions`."""

    def _chunk(self, text: str | None, finish_reason: str | None = None) -> bytes:
        return self._event([TextDelta(text or "", finish_reason=finish_reason)], self._no_usage)

    def _usage_chunk(self, tokens: TokenUsage) -> bytes:
        return self._event([], tokens)

    def _event(self, choices: list[TextDelta], tokens: TokenUsage | UnsetType | None) -> bytes:
        chunk = CompletionChunk(self._id, "text_completion", self._created, self._model, choices, tokens)
        return event(encode_json(chunk))


class ChatChunks(Chunks):
    """The stream of `/v1/chat/completions`."""

    def opening(self) -> bytes:
        """The role. Some clients measure the time to the first chunk, which must not include the queue."""
        return self._event([ChatDelta(Delta(role="assistant", content=""))], self._no_usage)

    def _chunk(self, text: str | None, finish_reason: str | None = None) -> bytes:
        delta = Delta() if text is None else Delta(content=text)
        return self._event([ChatDelta(delta, finish_reason=finish_reason)], self._no_usage)

    def _usage_chunk(self, tokens: TokenUsage) -> bytes:
        return self._event([], tokens)

    def _event(self, choices: list[ChatDelta], tokens: TokenUsage | UnsetType | None) -> bytes:
        kind: Literal["chat.completion.chunk"] = "chat.completion.chunk"
        return event(encode_json(ChatChunk(self._id, kind, self._created, self._model, choices, self._tier, tokens)))
