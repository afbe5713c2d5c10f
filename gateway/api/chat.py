"""`POST /v1/chat/completions` in OpenAI's format (https://platform.openai.com/docs/api-reference/chat).

A chat has two forms. Its plain form is text messages and sampling parameters, which the worker puts into the chat template
of its model. Its document form is the body as the client sent it, for a model that passes chats on to an endpoint
(scheduler/chat_document.py). `DocumentForm.needs` has the capabilities that the document form needs; a body that needs
none has both forms, and the pipeline chooses by the model.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import DocumentForm, InferenceRequest, InferenceResult, TokenUsage, usage
from gateway.api.inference import ApiFormat, Integer, check_model, completed
from gateway.api.passed_on_members import RawMembers, members_of, needs_of, passed_on_members
from gateway.api.sampling_fields import (
    NO_EFFECT,
    SAMPLING_NEEDS,
    SamplingFields,
    check_values,
    includes_usage,
    parameters_of,
)
from gateway.api.stream_chunks import chat_chunks
from gateway.auth.service_tier import response_tier
from gateway.http.body.large_strings import NO_STRINGS, LargeStrings, with_large_strings, without_large_strings
from gateway.http.body.reading import too_large
from gateway.http.body.strict_json import TOO_DEEP, check_duplicates, decode
from gateway.http.response import HttpResponse, encode_json
from gateway.http.validation import invalid
from scheduler.capabilities import Capability
from scheduler.chat_document import PRIORITY, with_known_roles
from scheduler.chat_events import joined
from scheduler.errors import RequestError
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages
from scheduler.protocol.replies import Reply
from scheduler.request_id import created_ms

MAX_MESSAGES = 10_000
MEDIA_TOKENS = 1000
"""Estimated tokens of an image or a recording, until the endpoint's usage is known."""

ACCEPTED: dict[str, tuple[Any, ...]] = {"store": (None, False)}
"""Unsupported fields -> the values that are accepted, because they have no effect."""

_NO_EFFECT: dict[str, tuple[Any, ...]] = NO_EFFECT | {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logprobs": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
"""Values that change nothing, and so need no capability. `tool_choice` has an effect only with tools."""

NEEDS = SAMPLING_NEEDS | {
    "tools": Capability.TOOLS,
    "tool_choice": Capability.TOOLS,
    "functions": Capability.TOOLS,
    "function_call": Capability.TOOLS,
    "response_format": Capability.STRUCTURED_OUTPUT,
    "logprobs": Capability.LOGPROBS,
    "top_logprobs": Capability.LOGPROBS,
    "reasoning_effort": Capability.REASONING,
    "modalities": Capability.AUDIO,
    "audio": Capability.AUDIO,
}
"""Field -> the capability that it needs, unless its value changes nothing."""


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A text."""

    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """The model's refusal, in a message of the assistant."""

    refusal: str


class MediaUrl(msgspec.Struct, frozen=True):
    """The address of an image, or the image itself as a `data:` URL."""

    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """An image."""

    image_url: MediaUrl


class Recording(msgspec.Struct, frozen=True):
    """A recording as base64."""

    data: str
    format: str


class AudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    """A recording."""

    input_audio: Recording


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    """A file, as the model's server expects it."""

    file: dict[str, Any]


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart
Content = str | list[Part]


class Turn(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    """One message of a conversation. Other members, such as those that another server has added to its message, are passed on to an
    endpoint, and ignored by other models.
    """

    content: Content
    name: str | None = None


class SystemTurn(Turn, frozen=True, kw_only=True, tag_field="role", tag="system"):
    """Instructions of the application."""


class DeveloperTurn(Turn, frozen=True, kw_only=True, tag_field="role", tag="developer"):
    """Instructions of the application, by their newer name."""


class UserTurn(Turn, frozen=True, kw_only=True, tag_field="role", tag="user"):
    """A message of the user."""


class ToolTurn(Turn, frozen=True, kw_only=True, tag_field="role", tag="tool"):
    """The result of a tool call."""

    tool_call_id: str


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    """An earlier message of the model. A client may send back every member of a response unchanged."""

    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    parsed: Any = None  # OpenAI's Python client adds it to responses of `parse()`, and sends it back.


ChatMessage = SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn


class ChatBody(SamplingFields, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The request body."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_MESSAGES})]
    max_completion_tokens: Integer | None = None
    response_format: dict[str, Any] | None = None
    store: bool | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None


class _AnyChatBody(ChatBody, forbid_unknown_fields=False, frozen=True, kw_only=True):
    """The body with fields that only some servers know."""


class AssistantMessage(msgspec.Struct, gc=False):
    """The message of the model. A model that passes chats on may add members, such as `reasoning_content`."""

    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, gc=False):
    """The message, and the reason of its end: `stop`, `length`, `tool_calls` or another one of the model's server."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
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


_decoder = msgspec.json.Decoder(_AnyChatBody)
_strict = msgspec.json.Decoder(ChatBody)


def read_chat(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """Raises RequestError that names the field."""
    short, strings = without_large_strings(raw)
    if strings:
        with suppress(RequestError):  # The error is that of the whole body.
            body, document = _decoded(short, strings)
            if set(strings) <= set(_media_of(body)):
                return chat_request(body, document, max_input_bytes)
    return chat_request(*_decoded(raw), max_input_bytes)


def _decoded(raw: bytes, strings: LargeStrings = NO_STRINGS) -> tuple[ChatBody, DocumentForm]:
    """A body and its document form. Raises RequestError that names the field."""
    try:
        body = decode(_decoder, raw)
    except RequestError as error:
        if error.param is None:  # An unknown field may be nested too deeply; if so, this names it.
            decode(_strict, raw)
        raise
    check_duplicates(raw)
    return body, chat_document(body, members_of(raw), strings)


def encode_chat(chat: Mapping[str, Any]) -> bytes:
    """A body that was translated from another format. Raises RequestError if it is nested too deeply."""
    try:
        return encode_json(chat)
    except RecursionError:
        raise invalid(None, TOO_DEEP) from None


def translated_chat(chat: Mapping[str, Any], names: Mapping[str, str], max_input_bytes: int) -> InferenceRequest:
    """The request of a body that was translated from another format. Raises RequestError.

    `names`: a field of the body -> the client's own, for the error if the model lacks its capability.
    """
    raw = encode_chat(chat)
    body = decode(_decoder, raw)
    document = chat_document(body, members_of(raw))
    needs = {capability: names.get(name, name) for capability, name in document.needs.items()}
    return chat_request(body, msgspec.structs.replace(document, needs=needs, translated=True), max_input_bytes)


def chat_request(body: ChatBody, document: DocumentForm, max_input_bytes: int) -> InferenceRequest:
    """The request of a decoded body with this document form. Raises RequestError that names the field."""
    check_model("model", body.model)
    check_values(body, ACCEPTED)
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:  # OpenAI rejects both, too.
        raise invalid(
            "max_completion_tokens", "Send `max_completion_tokens` or `max_tokens`, its older name, not both."
        )
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise invalid("messages", f"`messages` must have 1 to {MAX_MESSAGES} messages.")
    if document.size - document.media_bytes > max_input_bytes:
        raise too_large("`messages`", max_input_bytes, "messages")
    parameters = parameters_of(body, body.max_completion_tokens)
    return InferenceRequest(
        "" if document.needs else plain_messages(body.messages),
        body.model,
        parameters,
        Task.CHAT,
        service_tier=body.service_tier,
        stream=bool(body.stream),
        include_usage=includes_usage(body),
        document=document,
    )


def chat_document(body: ChatBody, members: RawMembers, strings: LargeStrings = NO_STRINGS) -> DocumentForm:
    """The document form of a body. `members`: its members as they are written, with marks instead of `strings`."""
    needs = needs_of(body, members, _FIELDS, NEEDS, _NO_EFFECT)
    media_bytes = media = 0
    for message in body.messages:
        if isinstance(message, ToolTurn) or (isinstance(message, AssistantTurn) and message.tool_calls):
            needs.setdefault(Capability.TOOLS, "messages")
        for part in message.content if isinstance(message.content, list) else ():
            if (wanted := PART_NEEDS.get(type(part))) is not None:
                needs.setdefault(wanted, "messages")
                media += 1
                media_bytes += sum(len(strings.get(text, text)) for text in _media_in(part))
    kept = passed_on_members(members, _FIELDS)
    if any(isinstance(message, DeveloperTurn) for message in body.messages):
        kept["messages"] = with_known_roles(kept["messages"])
    parameters = {PRIORITY: msgspec.json.decode(kept.pop(PRIORITY))} if PRIORITY in kept else {}
    tokens = media * MEDIA_TOKENS - media_bytes // 4
    parts = with_large_strings(msgspec.json.encode(kept), strings)
    text = "" if strings else bytes(parts[0]).decode()
    return DocumentForm(
        text,
        needs,
        tokens,
        body.n or 1,
        media_bytes,
        parameters=parameters,
        fields=_FIELDS,
        parts=parts if strings else [],
    )


_FIELDS = frozenset(ChatBody.__struct_fields__)
PART_NEEDS: dict[type[msgspec.Struct], Capability] = {
    ImagePart: Capability.IMAGES,
    AudioPart: Capability.AUDIO,
    FilePart: Capability.FILES,
}


def _media_of(body: ChatBody) -> Iterator[str]:
    """The images, recordings and files in the body."""
    for message in body.messages:
        for part in message.content if isinstance(message.content, list) else ():
            yield from _media_in(part)


def _media_in(part: Part) -> Iterator[str]:
    """Strings of base64, which are not text for the model."""
    if isinstance(part, ImagePart):
        yield part.image_url.url
    elif isinstance(part, AudioPart):
        yield part.input_audio.data
    elif isinstance(part, FilePart):
        yield from (value for value in part.file.values() if isinstance(value, str))


def plain_messages(messages: list[ChatMessage]) -> str:
    """The plain form of a conversation whose parts are texts."""
    return encode_messages([PromptMessage(_role(message), _text(message.content)) for message in messages])


def _role(message: ChatMessage) -> str:
    return str(type(message).__struct_config__.tag)


def _text(content: Content | None) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.text if isinstance(part, TextPart) else getattr(part, "refusal", "") for part in content)


def write_chat(result: InferenceResult) -> HttpResponse:
    """Write the response to a completed request."""
    reply = result.replies[0]
    if result.passed_on:
        body = encode_json(passed_on_completion(result, joined(reply.output)))
        return completed(reply, body, result.latency_ms, result.lines)
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


def passed_on_completion(result: InferenceResult, response: dict[str, Any]) -> dict[str, Any]:
    """The response of a model's server, with the gateway's id, model and tier, and tokens even if it counted none."""
    reply: Reply = result.replies[0]
    return {
        "id": reply.id,
        "object": "chat.completion",
        "created": created_ms(reply.id) // 1000,
        "model": result.model,
        "usage": usage(result.replies),
        "service_tier": response_tier(result.request.service_tier),
        "system_fingerprint": reply.model_version,
        **{name: value for name, value in response.items() if value is not None},
    }


CHAT = ApiFormat(read_chat, write_chat, "messages", flat=True, chunks=chat_chunks, endpoint="/v1/chat/completions")
