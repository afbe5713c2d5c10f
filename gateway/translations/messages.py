"""A body of `POST /v1/messages`, in Anthropic's format, as a chat in OpenAI's.

Blocks that have no counterpart in a chat: an error in a tool result is text with the prefix `Error: `; images in tool
results follow in a message of the user; thinking beside tool calls is `reasoning_content`, other thinking is left out,
since it is only useful while the model still calls tools. Cache marks have no effect, because servers cache by themselves;
`context_management` has none, because the model gets the whole conversation.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gateway.api.chat import MAX_MESSAGES, translated_chat
from gateway.api.format import InferenceRequest
from gateway.api.sampling_fields import MAX_STOPS
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.response import encode_json
from gateway.http.validation import invalid
from gateway.translations.message_body import (
    AnyToolChoice,
    AssistantBlock,
    AssistantOutput,
    AutoToolChoice,
    DocumentBlock,
    ImageAddress,
    ImageBlock,
    MessageBody,
    NamedToolChoice,
    NoThinking,
    NoToolChoice,
    OutputConfig,
    PromptBody,
    SearchResultBlock,
    SystemText,
    TextBlock,
    TextDocument,
    Thinking,
    ThinkingBlock,
    ThinkingBudget,
    ToolChoice,
    ToolDefinition,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserBlock,
    UserInput,
)

ERROR_MARK = "Error: "
MEDIUM_BUDGET, HIGH_BUDGET = 4096, 16_384
"""The first `budget_tokens` of thinking that are a medium and a high `reasoning_effort`."""

_decoder = msgspec.json.Decoder(MessageBody)
_prompt_decoder = msgspec.json.Decoder(PromptBody)
_TIERS = {"standard_only": "default"}
CLIENT_FIELDS = {"stop": "stop_sequences", "response_format": "output_config"}
"""OpenAI's name of a field -> Anthropic's, where they differ."""

THREAD = "thread"
"""The field of conversations that Anthropic stores. Its tool runner sends it, and does without where it is rejected."""

Chat = dict[str, Any]


def read_messages(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """The request of a body. Raises RequestError that names the client's field."""
    body = decode(_decoder, raw)
    check_duplicates(raw)
    if body.thread is not None:
        raise invalid(THREAD, f"`{THREAD}` is not supported here: send the whole conversation without it.")
    if body.stop_sequences is not None and len(body.stop_sequences) > MAX_STOPS:
        raise invalid("stop_sequences", f"`stop_sequences` must not have more than {MAX_STOPS} texts.")
    options = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stream": body.stream,
        "service_tier": body.service_tier and _TIERS.get(body.service_tier, body.service_tier),
    }
    return _request(body, {name: value for name, value in options.items() if value is not None}, max_input_bytes)


def read_prompt(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """The request of a body of `count_tokens`. Raises RequestError that names the client's field."""
    body = decode(_prompt_decoder, raw)
    check_duplicates(raw)
    return _request(body, {}, max_input_bytes)


def _request(body: PromptBody, options: Chat, max_input_bytes: int) -> InferenceRequest:
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise invalid("messages", f"`messages` must have 1 to {MAX_MESSAGES} messages.")
    config = body.output_config or OutputConfig()
    names = CLIENT_FIELDS | {"reasoning_effort": "thinking" if config.effort is None else "output_config"}
    return translated_chat(chat_of(body) | options, names, max_input_bytes)


def chat_of(body: PromptBody) -> Chat:
    """The same prompt as a body in OpenAI's format. Raises RequestError for a choice among no tools."""
    messages: list[Chat] = [{"role": "system", "content": _content(_parts(body.system))}] if body.system else []
    for message in body.messages:
        if isinstance(message, UserInput):
            messages += _user(message.content)
        elif isinstance(message, AssistantOutput):
            messages.append(_assistant(message.content))
        else:
            messages.append({"role": "system", "content": _content(_parts(message.content))})
    chat: Chat = {"model": body.model, "messages": messages}
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
        chat |= _tool_choice(body.tool_choice)
    elif isinstance(body.tool_choice, AnyToolChoice | NamedToolChoice):
        raise invalid("tool_choice", "`tool_choice` requires `tools`.")
    config = body.output_config or OutputConfig()
    if (effort := _effort(body.thinking, config.effort)) is not None:
        chat["reasoning_effort"] = effort
    if config.format is not None:
        schema = {"name": "output", "schema": config.format.schema, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _user(content: str | Sequence[UserBlock | ToolResultBlock]) -> Iterator[Chat]:
    """The results of tools first, since servers expect them behind the calls; then all else as one message."""
    blocks = () if isinstance(content, str) else content
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    parts: list[Chat] = []
    for result in results:
        found = _parts(result.content or "")
        text = "\n".join(part["text"] for part in found if part["type"] == "text")
        parts += [part for part in found if part["type"] != "text"]
        mark = ERROR_MARK if result.is_error else ""
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": mark + text}
    parts += _parts(content)
    if parts or not results:
        yield {"role": "user", "content": _content(parts)}


def _assistant(content: str | Sequence[AssistantBlock]) -> Chat:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    text = "".join(block.text for block in content if isinstance(block, TextBlock))
    thinking = "".join(block.thinking for block in content if isinstance(block, ThinkingBlock))
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": encode_json(block.input).decode()},
        }
        for block in content
        if isinstance(block, ToolUseBlock)
    ]
    if not calls:
        return {"role": "assistant", "content": text}
    message: Chat = {"role": "assistant", "content": text or None, "tool_calls": calls}
    return message | ({"reasoning_content": thinking} if thinking else {})


def _parts(content: str | Sequence[Any]) -> list[Chat]:
    """Texts, images and documents as parts of a message; other blocks are left out."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    parts: list[Chat] = []
    for block in content:
        if isinstance(block, TextBlock | SystemText):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, SearchResultBlock):
            lines = [f"{block.title} ({block.source})", *(part.text for part in block.content)]
            parts.append({"type": "text", "text": "\n".join(lines)})
        elif isinstance(block, ToolReferenceBlock):
            parts.append({"type": "text", "text": block.tool_name})
        elif isinstance(block, ImageBlock):
            source = block.source
            url = source.url if isinstance(source, ImageAddress) else f"data:{source.media_type};base64,{source.data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        elif isinstance(block, DocumentBlock) and isinstance(block.source, TextDocument):
            parts.append({"type": "text", "text": block.source.data})
        elif isinstance(block, DocumentBlock):
            data = f"data:{block.source.media_type};base64,{block.source.data}"
            parts.append({"type": "file", "file": {"filename": block.title or "document.pdf", "file_data": data}})
    return parts


def _content(parts: list[Chat]) -> str | list[Chat]:
    """The content of a message: a single text as a string, which every server accepts."""
    if all(part["type"] == "text" for part in parts) and len(parts) <= 1:
        return "".join(part["text"] for part in parts)
    return parts


def _tool(tool: ToolDefinition) -> Chat:
    function: Chat = {"name": tool.name, "parameters": tool.input_schema}
    options = {"description": tool.description, "strict": tool.strict}
    function |= {name: value for name, value in options.items() if value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> Mapping[str, Any]:
    if choice is None:
        return {}
    if isinstance(choice, NoToolChoice):
        return {"tool_choice": "none"}
    chosen: Any = "auto" if isinstance(choice, AutoToolChoice) else "required"
    if isinstance(choice, NamedToolChoice):
        chosen = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": chosen} | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})


def _effort(thinking: Thinking | None, effort: str | None) -> str | None:
    """OpenAI's `reasoning_effort`; None for the default of the model's server."""
    if isinstance(thinking, NoThinking):
        return None
    if effort is not None:
        return "high" if effort in ("xhigh", "max") else effort
    if not isinstance(thinking, ThinkingBudget):
        return None
    budget = thinking.budget_tokens
    return "low" if budget < MEDIUM_BUDGET else "medium" if budget < HIGH_BUDGET else "high"
