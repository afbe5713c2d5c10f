"""`POST /v1/chat/completions` in OpenAI's format (https://platform.openai.com/docs/api-reference/chat).

The worker gets the messages and applies the chat template of its model.
"""

from typing import Any, Literal

import msgspec

from gateway.api.format import InferenceRequest, InferenceResult, TokenUsage, usage
from gateway.api.inference import ApiFormat, Integer, check_model, completed
from gateway.api.openai_common import ACCEPTED_VALUES, SamplingFields, check_values, includes_usage, parameters_of
from gateway.api.stream_chunks import ChatChunks
from gateway.auth.service_tier import response_tier
from gateway.http.request import check_duplicates, check_text, decode
from gateway.http.response import HttpResponse, encode_json
from gateway.http.validation import invalid
from scheduler.payload import PromptMessage, Task, encode_messages
from scheduler.request_id import created_ms

MAX_MESSAGES = 1024


class TextPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One message. The fields that must be null are those of a response that a client sends back unchanged."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None


class ChatBody(SamplingFields, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The request body."""

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
    """The message of the model."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, gc=False):
    """The message, and the reason of its end: `stop` or `length`."""

    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: str


class ChatCompletion(msgspec.Struct, gc=False):
    """The response body. `created` is Unix time in seconds, from the request id."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    service_tier: str
    system_fingerprint: str


_decoder = msgspec.json.Decoder(ChatBody)
ACCEPTED = ACCEPTED_VALUES | {
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
    check_values(body, ACCEPTED)
    if body.max_tokens is not None and body.max_completion_tokens is not None:  # OpenAI rejects both, too.
        raise invalid(
            "max_completion_tokens", "Send `max_completion_tokens` or `max_tokens`, its older name, not both."
        )
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise invalid("messages", f"`messages` must have 1 to {MAX_MESSAGES} messages.")
    conversation = encode_messages([PromptMessage(message.role, _text(message.content)) for message in body.messages])
    check_text("messages", conversation, max_input_bytes)
    return InferenceRequest(
        conversation,
        body.model,
        parameters_of(body, body.max_completion_tokens),
        Task.CHAT,
        service_tier=body.service_tier,
        stream=bool(body.stream),
        include_usage=includes_usage(body),
    )


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def write_chat(result: InferenceResult) -> HttpResponse:
    """Write the response to a completed request."""
    reply = result.replies[0]
    document = ChatCompletion(
        id=reply.id,
        object="chat.completion",
        created=created_ms(reply.id) // 1000,
        model=result.model,
        choices=[ChatChoice(0, AssistantMessage("assistant", reply.output), None, reply.finish_reason)],
        usage=usage(result.replies),
        service_tier=response_tier(result.request.service_tier),
        system_fingerprint=reply.model_version,
    )
    return completed(reply, encode_json(document), result.latency_ms, result.lines)


CHAT = ApiFormat(read_chat, write_chat, "messages", flat=True, chunks=ChatChunks, endpoint="/v1/chat/completions")
