"""The body of `POST /v1/responses` (https://platform.openai.com/docs/api-reference/responses), and of `input_tokens`."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from gateway.api.chat import Recording
from gateway.api.inference import Integer, check_model
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.validation import invalid
from gateway.translations.response_id import request_id_of

MAX_ITEMS = 10_000
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's limits.

B = TypeVar("B", bound="ResponsePrompt")
Item = dict[str, Any]

Metadata = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=MAX_METADATA_NAME)],
        Annotated[str, msgspec.Meta(max_length=MAX_METADATA_VALUE)],
    ],
    msgspec.Meta(max_length=MAX_METADATA),
]


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """A text of the client."""

    text: str


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """A text of the model, in an earlier message."""

    text: str


class RefusalText(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """The model's refusal, in an earlier message."""

    refusal: str


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    """An image, by its address or as a `data:` URL."""

    image_url: str
    detail: str | None = None


class InputFile(msgspec.Struct, frozen=True, tag_field="type", tag="input_file"):
    """A file as a `data:` URL."""

    file_data: str
    filename: str | None = None


class InputAudio(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    """A recording as base64."""

    input_audio: Recording


InputPart = InputText | OutputText | RefusalText | InputImage | InputFile | InputAudio


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the application, the user or the model."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call that the model requested."""

    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call_output"):
    """The result of a call."""

    call_id: str
    output: str | list[InputPart]


class CustomCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool that the model requested."""

    call_id: str
    name: str
    input: str


class CustomOutputItem(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call_output"):
    """The result of a call of a custom tool."""

    call_id: str
    output: str | list[InputPart]


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier response. A chat has no place for it, so it is left out."""


InputItem = MessageItem | FunctionCallItem | FunctionOutputItem | CustomCallItem | CustomOutputItem | ReasoningItem


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: str
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ToolChoiceFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one function to call."""

    type: str
    name: str


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much the model reasons. Its reasoning is returned as it is, so that there is no choice of a summary."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class PlainFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON of a schema."""

    name: str
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


TextFormat = PlainFormat | JsonFormat | SchemaFormat


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ObfuscationOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Padding that hides the size of tokens. It is ignored."""

    include_obfuscation: bool | None = None


class ResponsePrompt(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The body of `POST /v1/responses/input_tokens`: the fields that the model reads. Null is the same as absent."""

    model: str
    input: str | Annotated[list[Item], msgspec.Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_ITEMS})]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None


class ResponseBody(ResponsePrompt, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The request body of `POST /v1/responses`; null is the same as absent."""

    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ObfuscationOption | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    include: list[str] | None = None
    top_logprobs: Integer | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: Integer | None = None
    client_metadata: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(ResponseBody)
_prompt_decoder = msgspec.json.Decoder(ResponsePrompt)


def read_body(raw: bytes) -> ResponseBody:
    """Decode and check a body but for its items. Raises RequestError that names the field."""
    body = _checked(decode(_decoder, raw), raw)
    if body.background and body.store is False:
        raise invalid("store", "`background: true` needs a stored response: leave `store` out.")
    return body


def read_prompt(raw: bytes) -> ResponseBody:
    """The body with the fields of one whose tokens are counted. Raises RequestError that names the field."""
    body = _checked(decode(_prompt_decoder, raw), raw)
    return ResponseBody(**msgspec.structs.asdict(body), store=False)


def _checked(body: B, raw: bytes) -> B:
    check_duplicates(raw)
    check_model("model", body.model)
    if body.previous_response_id is not None and request_id_of(body.previous_response_id) is None:
        raise invalid("previous_response_id", "`previous_response_id` must be the id of a response: `resp_...`.")
    return body
