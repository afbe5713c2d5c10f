"""The common form of requests and results of all API formats, and OpenAI's token usage."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.chat_document import DOCUMENT, Capability
from scheduler.payload import Payload, Task
from scheduler.protocol.replies import Reply


class ChatDocument(msgspec.Struct, frozen=True, gc=False):
    """A chat for a model that passes chats on: the body for its server (scheduler/chat_document.py).

    `needs`: the capabilities that it needs, each with the field that needs it. `tokens` corrects the estimate from the size
    of the input, in which `media_bytes` are images and recordings, no text. `choices`: number of outputs. `translated`: the
    client sent it in another format, which knows all of its fields.
    """

    input: str
    needs: Mapping[Capability, str]
    tokens: int = 0
    choices: int = 1
    media_bytes: int = 0
    translated: bool = False


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """A decoded and checked body.

    `more`: further inputs of a list, each a request of its own; all of them are admitted or none. `include_usage`: whether a
    stream ends with a chunk of its usage. `floats`: whether vectors are lists of numbers instead of base64. `document`: a
    chat's other form, for models that pass chats on; the only one if it needs a capability.
    """

    input: str
    model: str | UnsetType = UNSET
    parameters: Mapping[str, Any] = {}
    task: Task = Task.COMPLETE
    more: tuple[str, ...] = ()
    service_tier: str | None = None
    stream: bool = False
    include_usage: bool = False
    floats: bool = False
    document: ChatDocument | None = None

    def payload(self, model: str, *, passed_on: bool) -> Payload:
        """The payload of the first input; `passed_on`: in the document form, for a model that passes chats on."""
        if passed_on and self.document is not None:
            return Payload(model, self.document.input, dict(self.parameters), Task.CHAT_DOCUMENT)
        return Payload(model, self.input, dict(self.parameters), self.task)

    def identified(self, payload: Payload) -> Payload:
        """The payload that is compared if the Idempotency-Key is used again. The form of a chat makes no difference."""
        if payload.task is not Task.CHAT_DOCUMENT or self.document is None:
            return payload
        if self.document.needs:  # White space and the order of members make no difference either.
            with contextlib.suppress(RecursionError):  # A body near the limit is compared as it is written.
                decoded = msgspec.json.decode(payload.input)
                return payload.with_input(msgspec.json.encode(decoded, order="sorted").decode())
            return payload
        return self.payload(payload.model, passed_on=False)


class InferenceResult(msgspec.Struct, frozen=True, gc=False):
    """The result of a request: a reply per input, in order; the first one has the id of the response.

    `latency_ms` is the time since arrival; `lines` are more header lines, each with its end.
    """

    replies: Sequence[Reply]
    request: InferenceRequest
    model: str
    tier: str
    latency_ms: float
    lines: str

    @property
    def passed_on(self) -> bool:
        """Whether the output is lines of a model's server."""
        return self.replies[0].finish_reason == DOCUMENT


class TokenUsage(msgspec.Struct, gc=False):
    """Tokens of one call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage(replies: Sequence[Reply]) -> TokenUsage:
    """The sum of tokens. A model that does not distinguish them reports all as prompt tokens."""
    written = sum(reply.output_tokens for reply in replies)
    total = sum(reply.tokens_used for reply in replies)
    return TokenUsage(max(0, total - written), written, total)
