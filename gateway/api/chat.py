"""`POST /v1/chat/completions` in OpenAI's form (https://platform.openai.com/docs/api-reference/chat): a conversation goes on.

What a conversation looks like to a model is the model's own matter: its worker gets the messages and puts them into the
model's template.
"""

from typing import Any, Literal

import msgspec

from gateway.api.format import InferenceRequest, InferenceResult, TokenUsage, usage
from gateway.api.inference import ApiFormat, Integer, check_model, completed
from gateway.api.openai_common import HARMLESS, SamplingFields, check_harmless, includes_usage, parameters_of
from gateway.api.stream_chunks import ChatChunks
from gateway.auth.service_tier import told
from gateway.http.request import check_duplicates, check_text, decode, invalid
from gateway.http.response import HttpResponse, encode_json
from scheduler.payload import PromptMessage, Task, encode_messages
from scheduler.request_id import created_ms

MAX_MESSAGES = 1024


class TextPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A part of a content; text is the only kind that models here read."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One message. The fields that are always null are those of an answer that is sent back as it was dumped."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None


class ChatBody(SamplingFields, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What OpenAI's clients send."""

    messages: list[ChatMessage]
    max_completion_tokens: Integer | None = None
    response_format: dict[str, Any] | None = None
    store: bool | None = None
    modalities: list[str] | None = None
    prompt_cache_retention: str | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None


class AssistantMessage(msgspec.Struct, gc=False):
    """What the model said."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, gc=False):
    """The answer, and why it ends there: `stop` or `length`."""

    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: str


class ChatCompletion(msgspec.Struct, gc=False):
    """The answer. `created` is in seconds of Unix time, as the request's id carries it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    service_tier: str
    system_fingerprint: str


_decoder = msgspec.json.Decoder(ChatBody)
TAKEN: dict[str, tuple[Any, ...]] = HARMLESS | {
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "modalities": (None, ["text"]),
    "logprobs": (None, False),
    "top_logprobs": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
}


def read_chat(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """Raises RequestError that names the field."""
    body = decode(_decoder, raw)
    check_duplicates(raw)
    check_model("model", body.model)
    check_harmless(body, TAKEN)
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise invalid("messages", f"`messages` must hold 1 to {MAX_MESSAGES} messages.")
    conversation = encode_messages([PromptMessage(message.role, _text(message.content)) for message in body.messages])
    check_text("messages", conversation, max_input_bytes)
    return InferenceRequest(
        conversation,
        body.model,
        parameters_of(body, _most_tokens(body)),
        Task.CHAT,
        service_tier=body.service_tier,
        stream=bool(body.stream),
        include_usage=includes_usage(body),
    )


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _most_tokens(body: ChatBody) -> int | None:
    """`max_tokens` by its newer name. Raises RequestError where both are there, as OpenAI does."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None:
        raise invalid(
            "max_completion_tokens", "Send `max_completion_tokens` or `max_tokens`, its older name, not both."
        )
    return new


def write_chat(served: InferenceResult) -> HttpResponse:
    """The answer for a completed request."""
    reply = served.replies[0]
    document = ChatCompletion(
        id=reply.id,
        object="chat.completion",
        created=created_ms(reply.id) // 1000,
        model=served.model,
        choices=[ChatChoice(0, AssistantMessage("assistant", reply.output), None, reply.finish_reason)],
        usage=usage(served.replies),
        service_tier=told(served.asked.service_tier),
        system_fingerprint=reply.model_version,
    )
    return completed(reply, encode_json(document), served.latency_ms, served.lines)


CHAT = ApiFormat(read_chat, write_chat, "messages", flat=True, chunks=ChatChunks, endpoint="/v1/chat/completions")
