"""What OpenAI's clients read of a stream: chunks of a completion or of a chat, each of them one event.

A chunk of a stream is an answer in which only what is new is said: the text that was added, then why it ended, then,
where the client asked for it, the usage.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceRequest, TokenUsage, usage
from gateway.auth.service_tier import told
from gateway.http.response import encode_json
from scheduler.protocol.replies import Reply
from scheduler.request_id import created_ms

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that came to its end."""


def event(json: bytes) -> bytes:
    """One event."""
    return b"data: " + json + b"\n\n"


class Chunks(Protocol):
    """The events of one stream, in their order."""

    def opening(self) -> bytes:
        """Before anything is known; b"" for nothing."""

    def delta(self, text: str) -> bytes:
        """More text."""

    def closing(self, reply: Reply) -> bytes:
        """Why it ended, and its usage."""


MakeChunks = Callable[[str, str, InferenceRequest], Chunks]
"""From the request's id, its model and what was asked."""


class TextDelta(msgspec.Struct, gc=False):
    """What was added to a completion."""

    text: str
    index: int = 0
    logprobs: None = None
    finish_reason: str | None = None


class Delta(msgspec.Struct, gc=False):
    """What was added to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, gc=False):
    """The message that is added to."""

    delta: Delta
    index: int = 0
    logprobs: None = None
    finish_reason: str | None = None


class CompletionChunk(msgspec.Struct, gc=False):
    """One event of a completion. `usage` is null until the last one, where the client asked for it, and else not there."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextDelta]
    usage: TokenUsage | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, gc=False):
    """One event of a chat. `usage` is null until the last one, where the client asked for it, and else not there."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    service_tier: str
    usage: TokenUsage | UnsetType | None = UNSET


class CompletionChunks:
    """The stream of `/v1/completions`."""

    def __init__(self, request_id: str, model: str, asked: InferenceRequest) -> None:
        self._id = request_id
        self._created = created_ms(request_id) // 1000
        self._model = model
        self._unused = None if asked.include_usage else UNSET

    def opening(self) -> bytes:
        """Nothing is known of a text before it begins."""
        return b""

    def delta(self, text: str) -> bytes:
        """As `Chunks` says."""
        return self._event([TextDelta(text)], self._unused)

    def closing(self, reply: Reply) -> bytes:
        """As `Chunks` says."""
        last = self._event([TextDelta("", finish_reason=reply.finish_reason)], self._unused)
        return last if self._unused is UNSET else last + self._event([], usage([reply]))

    def _event(self, choices: list[TextDelta], used: TokenUsage | UnsetType | None) -> bytes:
        chunk = CompletionChunk(self._id, "text_completion", self._created, self._model, choices, used)
        return event(encode_json(chunk))


class ChatChunks:
    """The stream of `/v1/chat/completions`."""

    def __init__(self, request_id: str, model: str, asked: InferenceRequest) -> None:
        self._id = request_id
        self._created = created_ms(request_id) // 1000
        self._model = model
        self._tier = told(asked.service_tier)
        self._unused = None if asked.include_usage else UNSET

    def opening(self) -> bytes:
        """Who speaks. Some clients count the time until the first chunk, and a queue may be long."""
        return self._event([ChatDelta(Delta(role="assistant", content=""))], self._unused)

    def delta(self, text: str) -> bytes:
        """As `Chunks` says."""
        return self._event([ChatDelta(Delta(content=text))], self._unused)

    def closing(self, reply: Reply) -> bytes:
        """As `Chunks` says."""
        last = self._event([ChatDelta(Delta(), finish_reason=reply.finish_reason)], self._unused)
        return last if self._unused is UNSET else last + self._event([], usage([reply]))

    def _event(self, choices: list[ChatDelta], used: TokenUsage | UnsetType | None) -> bytes:
        kind: Literal["chat.completion.chunk"] = "chat.completion.chunk"
        return event(encode_json(ChatChunk(self._id, kind, self._created, self._model, choices, self._tier, used)))
