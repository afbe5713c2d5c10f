"""The common form of requests and results of all API formats, and OpenAI's token usage."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.http.body.reading import too_large
from gateway.http.validation import unknown_field
from ratelimit.request_limits import RequestLimits
from scheduler.capabilities import ENDPOINT, Capability
from scheduler.chat_document import DOCUMENT
from scheduler.context_length import ContextOverflow
from scheduler.errors import ErrorCode, RequestError
from scheduler.payload import DOCUMENTS, Payload, Task
from scheduler.protocol.replies import Reply


class DocumentForm(msgspec.Struct, frozen=True, gc=False):
    """A request for a model that passes requests on: the body for its server (scheduler/chat_document.py).

    `needs`: the capabilities that it needs, each with the field that needs it. `tokens` corrects the estimate from the size
    of the input, in which `media_bytes` are images and recordings, no text. `choices`: number of outputs. `translated`: the
    client sent it in another format, which knows all of its fields. `more`: the inputs of the rest of a list. `fields`: all
    known fields of the format. `parts`: instead of the input, if it has large images, which are not copied; empty once they
    are in a file. `parameters`: those that travel beside the input. With the task EMBED the input is a text, and the fields
    are parameters of the request.
    """

    input: str
    needs: Mapping[str, str]
    tokens: int = 0
    choices: int = 1
    media_bytes: int = 0
    parameters: Mapping[str, Any] = {}
    translated: bool = False
    task: Task = Task.CHAT_DOCUMENT
    more: tuple[str, ...] = ()
    fields: frozenset[str] = frozenset()
    parts: list[bytes | memoryview] = []

    @property
    def text(self) -> str:
        """The whole input."""
        return b"".join(self.parts).decode() if self.parts else self.input

    @property
    def size(self) -> int:
        """Bytes of the whole input."""
        if self.parts:
            return sum(map(len, self.parts))
        return len(self.input) if self.input.isascii() else len(self.input.encode())


def missing_capability(document: DocumentForm, model: str, has: frozenset[str]) -> RequestError | None:
    """The error for the first capability that the request needs and the model does not have; None if it has all."""
    for capability, name in document.needs.items():
        if capability in has:
            continue
        if capability == Capability.EXTENSIONS and not document.translated:
            return unknown_field(name, document.fields)
        message = f"`{name}` needs the capability `{capability}`, which the model `{model}` does not have."
        if capability == ENDPOINT:
            message = f"`{name}` needs a model with an endpoint, which `{model}` is not."
        return RequestError(ErrorCode.INVALID_REQUEST, message, name)
    return None


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """A decoded and checked body.

    `more`: further inputs of a list, each a request of its own; all of them are admitted or none. `include_usage`: whether a
    stream ends with a chunk of its usage. `floats`: whether vectors are lists of numbers instead of base64. `document`: its
    other form, for models that pass requests on; the only one if it needs a capability.
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
    document: DocumentForm | None = None

    def payload(self, model: str, *, passed_on: bool) -> Payload:
        """The payload of the first input; `passed_on`: in the document form, for a model that passes requests on.

        Without the parts of the document, which the pipeline adds.
        """
        if passed_on and self.document is not None:
            parameters = {**self.parameters, **self.document.parameters}
            return Payload(model, self.document.input, parameters, self.document.task)
        return Payload(model, self.input, dict(self.parameters), self.task)

    def inputs(self, payload: Payload) -> tuple[str, ...]:
        """All inputs, in the form of this payload of the first one."""
        more = self.document.more if self.document is not None and payload.task in DOCUMENTS else self.more
        return (payload.input, *more)

    def identified(self, payload: Payload) -> Payload:
        """The payload that is compared if the Idempotency-Key is used again. The form makes no difference."""
        if payload.task not in DOCUMENTS or self.document is None:
            return payload
        if self.document.needs:  # White space and the order of members make no difference either.
            text = self.document.text if self.document.parts else payload.input
            with contextlib.suppress(RecursionError):  # A body near the limit is compared as it is written.
                text = msgspec.json.encode(msgspec.json.decode(text), order="sorted").decode()
            return payload.with_input(text)
        return self.payload(payload.model, passed_on=False)


def check_size(body: InferenceRequest, size: int, limits: RequestLimits) -> None:
    """Check a body of `size` bytes by the limits of its model's pool, which may be below those it was read with.

    Raises RequestError: 413, or `context_length_exceeded` for a text that cannot fit into the model's context.
    """
    document = body.document
    is_chat = document is not None and document.task is Task.CHAT_DOCUMENT
    chat = document.size - document.media_bytes if document is not None and is_chat else 0
    if max(size, chat) <= limits.text_bytes:
        return
    if size > limits.body_bytes:
        raise too_large("The body of a request to this model", limits.body_bytes)
    longest = max(chat, *(len(text.encode()) for text in (body.input, *body.more)))
    if longest > limits.input_bytes:
        raise too_large("The text of a request to this model", limits.input_bytes)
    if longest > limits.text_bytes:
        raise RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, ContextOverflow(most=limits.context_tokens).sentence())


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
