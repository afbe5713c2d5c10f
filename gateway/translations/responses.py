"""The request of `POST /v1/responses` as a chat.

The items of a conversation become messages. The chat is read as a body of `/v1/chat/completions` is, so that both have the
same checks and capabilities; its errors name the fields of this format.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.api.chat import encode_chat, read_chat
from gateway.api.format import InferenceRequest
from gateway.http.body.absent_members import NOTHING
from gateway.http.response import encode_json
from gateway.http.validation import invalid, validation_error
from gateway.translations.custom_tools import CUSTOM, CUSTOM_INPUT, CustomTool, offered_tools
from gateway.translations.response_body import (
    MAX_ITEMS,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    InputAudio,
    InputFile,
    InputImage,
    InputItem,
    InputPart,
    Item,
    JsonFormat,
    MessageItem,
    ReasoningItem,
    RefusalText,
    ResponseBody,
    SchemaFormat,
    ToolChoiceFunction,
    read_body,
)
from scheduler.errors import RequestError

_ITEM_TYPES = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    }
)
_LOGPROBS = "message.output_text.logprobs"
"""The only value of `include` that has an effect: what others name is always there, or never."""

TOOL_CHOICES = ("none", "auto", "required")

_RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "include",
}
"""Fields of a chat -> the fields of this format that they are made of."""

T = TypeVar("T")


class _Items(msgspec.Struct, frozen=True):
    """The input, for errors that name it."""

    input: list[InputItem]


class ResponsesRequest(InferenceRequest, frozen=True, gc=False, kw_only=True):
    """The chat of a body, with the body itself, whose fields are repeated in the response."""

    original: ResponseBody


def read_responses(raw: bytes, max_input_bytes: int) -> ResponsesRequest:
    """The chat of a body without an earlier response. Raises RequestError that names the field."""
    return request_of(read_body(raw), (), max_input_bytes)


def request_of(body: ResponseBody, history: Sequence[Item], max_input_bytes: int) -> ResponsesRequest:
    """The chat of a body and of the items of earlier responses. Raises RequestError that names the field."""
    items = [*_read_items(history), *_read_items(input_items(body))]
    chat = _chat_of(body, items)
    try:
        request = read_chat(encode_chat(chat), max_input_bytes)
    except RequestError as error:
        raise renamed(error) from None
    document = request.document
    if document is not None:
        needs = {capability: _RENAMED.get(name, name) for capability, name in document.needs.items()}
        document = msgspec.structs.replace(document, needs=needs, translated=True)
    fields = msgspec.structs.asdict(request) | {"document": document}
    return ResponsesRequest(**fields, original=body)


def renamed(error: RequestError) -> RequestError:
    """An error about a field of the chat, about the field of this format."""
    name = error.param
    if name is None or name not in _RENAMED:
        return error
    message = re.sub(rf"(^|`){name}\b", rf"\1{_RENAMED[name]}", error.message)
    return RequestError(error.code, message, _RENAMED[name])


def input_items(body: ResponseBody) -> list[Item]:
    """The items of the input, each with its type; a text is a message of the user. Raises RequestError."""
    if isinstance(body.input, str):
        if not body.input:
            raise invalid("input", "`input` must not be empty.")
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    if not 1 <= len(body.input) <= MAX_ITEMS:
        raise invalid("input", f"`input` must have 1 to {MAX_ITEMS} items.")
    items: list[Item] = []
    for item in body.input:
        if item.get("type") is None:
            item = {**item, "type": "message"}
        if item["type"] == "message" and isinstance(item.get("content"), str):  # The stored form is a list of parts.
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item = {**item, "content": [{"type": kind, "text": item["content"]}]}
        items.append(item)
    return items


def _read_items(items: Sequence[Item]) -> list[InputItem]:
    for number, item in enumerate(items):
        if (kind := str(item["type"])[:64]) not in _ITEM_TYPES:
            known = ", ".join(f"`{each}`" for each in sorted(_ITEM_TYPES))
            message = f"`input[{number}]` has the type `{kind}`, which is not supported here, only {known}."
            raise invalid("input", message)
    try:
        return msgspec.convert({"input": items}, _Items).input
    except msgspec.ValidationError as error:
        raise validation_error(str(error), kind=_Items) from None


def _chat_of(body: ResponseBody, items: Sequence[InputItem]) -> dict[str, Any]:
    """The body of the chat."""
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    for item in items:
        _add_message(messages, item)
    if all(isinstance(item, ReasoningItem) for item in items):
        raise invalid("input", "`input` has only reasoning: add a message.")
    tools = [_chat_tool(tool, place) for place, tool, _ in offered_tools(body.tools or ())]
    logprobs = True if body.top_logprobs or _LOGPROBS in (body.include or ()) else None
    wanted = body.text.format if body.text is not None else None
    response_format: dict[str, Any] | None = None
    if isinstance(wanted, JsonFormat):
        response_format = {"type": "json_object"}
    elif isinstance(wanted, SchemaFormat):
        response_format = {"type": "json_schema", "json_schema": _present(msgspec.structs.asdict(wanted))}
    chat = {
        "model": body.model,
        "messages": messages,
        "stream": None if body.background else body.stream,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": tools or None,
        "tool_choice": _chat_tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls if tools else None,
        "response_format": response_format,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "logprobs": logprobs,
        "top_logprobs": body.top_logprobs or None,
        "service_tier": body.service_tier,
    }
    return _present(chat)


def _add_message(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Add an item to the messages. Calls belong to the message of the assistant before them."""
    if isinstance(item, MessageItem):
        messages.append({"role": item.role, "content": _content(item.content)})
    elif isinstance(item, FunctionOutputItem | CustomOutputItem):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        if isinstance(item, CustomCallItem):
            arguments = encode_json({CUSTOM_INPUT: item.input}).decode()
        else:
            arguments = item.arguments
        function = {"name": item.name, "arguments": arguments}
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})


def _content(content: str | Iterable[InputPart]) -> str | list[dict[str, Any]]:
    """The content of a message. A single text is a string, which every server accepts."""
    if isinstance(content, str):
        return content
    parts = [_chat_part(part) for part in content]
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _chat_part(part: InputPart) -> dict[str, Any]:
    if isinstance(part, InputImage):
        url = {"url": part.image_url} | ({} if part.detail is None else {"detail": part.detail})
        return {"type": "image_url", "image_url": url}
    if isinstance(part, InputFile):
        name = {} if part.filename is None else {"filename": part.filename}
        return {"type": "file", "file": {"file_data": part.file_data} | name}
    if isinstance(part, InputAudio):
        return {"type": "input_audio", "input_audio": part.input_audio}
    if isinstance(part, RefusalText):
        return {"type": "refusal", "refusal": part.refusal}
    return {"type": "text", "text": part.text}


def _chat_tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == CUSTOM:
        return {"type": "function", "function": _converted(tool, CustomTool, place).function()}
    if kind != "function":
        message = (
            f"`{place}` is of the type `{str(kind)[:64]}`: only tools of the types `function` and `{CUSTOM}` are "
            "supported. Turn this tool off in the client."
        )
        raise invalid("tools", message)
    function = _converted(tool, FunctionTool, place)
    fields = msgspec.structs.asdict(function)
    del fields["type"]
    return {"type": "function", "function": _present(fields)}


def _chat_tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or choice in TOOL_CHOICES:
        return choice
    if isinstance(choice, str) or choice.get("type") not in ("function", CUSTOM):
        kind = choice if isinstance(choice, str) else choice.get("type")
        known = ", ".join(f"`{each}`" for each in TOOL_CHOICES)
        message = f"`tool_choice` is `{str(kind)[:64]}`: only {known} and a tool of the type `function` or `{CUSTOM}` are supported."
        raise invalid("tool_choice", message)
    return {"type": "function", "function": {"name": _converted(choice, ToolChoiceFunction, "tool_choice").name}}


def _converted(value: Mapping[str, Any], kind: type[T], place: str) -> T:
    """The member of the body at `place` as this type. Raises RequestError that names the place."""
    try:
        return msgspec.convert({name: each for name, each in value.items() if each not in NOTHING}, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`")
        raise validation_error(f"{reason} - at `$.{place}{path}`") from None


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value: not every server knows all of them."""
    return {name: value for name, value in fields.items() if value is not None}
