"""The body of `POST /v1/messages` in Anthropic's format (https://docs.anthropic.com/en/api/messages), and of `count_tokens`."""

from typing import Annotated, Any, Literal

import msgspec

from gateway.api.chat import MAX_MESSAGES
from gateway.api.inference import Integer
from gateway.api.sampling_fields import MAX_STOPS


class TextBlock(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="text"):
    """A text."""

    text: str


class SystemText(msgspec.Struct, frozen=True):
    """A text of the system prompt. The type of a tagged struct is only required in a union."""

    type: Literal["text"]
    text: str


class Base64Image(msgspec.Struct, frozen=True, tag_field="type", tag="base64"):
    """An image as base64."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageAddress(msgspec.Struct, frozen=True, tag_field="type", tag="url"):
    """The URL of an image."""

    url: str


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """An image."""

    source: Base64Image | ImageAddress


class Base64Document(msgspec.Struct, frozen=True, tag_field="type", tag="base64"):
    """A PDF as base64."""

    media_type: Literal["application/pdf"]
    data: str


class TextDocument(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A document as text."""

    media_type: Literal["text/plain"]
    data: str


class DocumentBlock(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    """A document."""

    source: Base64Document | TextDocument
    title: str | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="tool_use"):
    """A call of a tool by the model."""

    id: str
    name: str
    input: dict[str, Any]


class SearchResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="search_result"):
    """A passage that the application has found, with its origin."""

    source: str
    title: str
    content: list[SystemText]


class ToolReferenceBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """A tool that a search for tools has found. The model has the definitions of all tools, so that the name is enough."""

    tool_name: str


UserBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[UserBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="thinking"):
    """The model's reasoning. The signature is empty: no server behind this gateway signs."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only Anthropic's servers can read."""

    data: str


AssistantBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class UserInput(msgspec.Struct, frozen=True, tag_field="role", tag="user"):
    """A message of the user, or results of tools."""

    content: str | list[UserBlock | ToolResultBlock]


class AssistantOutput(msgspec.Struct, frozen=True, tag_field="role", tag="assistant"):
    """An earlier message of the model."""

    content: str | list[AssistantBlock]


class SystemInput(msgspec.Struct, frozen=True, tag_field="role", tag="system"):
    """Instructions of the application within the conversation."""

    content: str | list[SystemText]


InputMessage = UserInput | AssistantOutput | SystemInput


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the client. Tools that Anthropic's servers run are not supported."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class AutoToolChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="auto"):
    """The model decides."""

    disable_parallel_tool_use: bool = False


class AnyToolChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="any"):
    """The model calls at least one tool."""

    disable_parallel_tool_use: bool = False


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="tool"):
    """The model calls this tool."""

    name: str
    disable_parallel_tool_use: bool = False


class NoToolChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="none"):
    """The model calls no tool."""


ToolChoice = AutoToolChoice | AnyToolChoice | NamedToolChoice | NoToolChoice


class ThinkingBudget(msgspec.Struct, frozen=True, tag_field="type", tag="enabled"):
    """The model thinks for about so many tokens."""

    budget_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class AdaptiveThinking(msgspec.Struct, frozen=True, tag_field="type", tag="adaptive"):
    """The model decides how much it thinks."""


class ThinkingBetweenTools(msgspec.Struct, frozen=True, tag_field="type", tag="between_tools"):
    """The model decides, as for adaptive thinking."""


class NoThinking(msgspec.Struct, frozen=True, tag_field="type", tag="disabled"):
    """No effort is requested."""


Thinking = ThinkingBudget | AdaptiveThinking | ThinkingBetweenTools | NoThinking


class MessageJsonFormat(msgspec.Struct, frozen=True):
    """The schema of the output."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Effort and format of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageJsonFormat | None = None


class ClientMetadata(msgspec.Struct, frozen=True):
    """The client's own user. It is accepted and not stored."""

    user_id: str | None = None


class PromptBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`: the fields that the model reads."""

    model: str
    messages: Annotated[list[InputMessage], msgspec.Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_MESSAGES})]
    system: str | list[SystemText] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None


class MessageBody(PromptBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    stop_sequences: Annotated[list[str], msgspec.Meta(extra_json_schema={"maxItems": MAX_STOPS})] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    stream: bool | None = None
    service_tier: str | None = None
    metadata: ClientMetadata | None = None
    thread: dict[str, Any] | None = None
