"""The description of `/v1/responses` in OpenAI's format."""

from dataclasses import replace

from gateway.http.response import JSON
from gateway.http.response_headers import Schema
from gateway.http.sse import EVENTS
from gateway.openapi.endpoint_kinds import (
    READ_METHODS,
    SERVICE_TIER,
    account_endpoint,
    inference_endpoint,
    token_count_endpoint,
)
from gateway.openapi.model import ApiEndpoint, Parameter
from gateway.openapi.schemas import NOT_EMPTY, inlined, only
from gateway.translations.custom_tools import CUSTOM, NAMESPACE, NOT_OFFERED, CustomTool
from gateway.translations.response_body import (
    MAX_ITEMS,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    MessageItem,
    ReasoningItem,
    ResponseBody,
    ResponsePrompt,
    TextOptions,
    ToolChoiceFunction,
)
from gateway.translations.response_document import ResponseDocument, ResponseEvent
from gateway.translations.response_handlers import LONGEST_NUMBER, MOST, PAGE, InputTokens, ResponseItems
from gateway.translations.response_id import RESPONSE_ID_PATTERN
from gateway.translations.responses import TOOL_CHOICES
from scheduler.errors import ErrorCode

PAGE_PARAMETERS = (
    Parameter("limit", "query", f"Most items, {PAGE} by default.", {"type": "integer", "minimum": 1, "maximum": MOST}),
    Parameter("order", "query", "`desc`, the newest first, or `asc`.", only("asc", "desc")),
    Parameter("after", "query", "The id of the last item of the page before."),
)
BACKGROUND: Schema = {
    "not": {
        "properties": {"background": {"const": True}, "store": {"const": False}},
        "required": ["background", "store"],
    }
}
"""`background` needs a stored response."""

_NO_TYPE = inlined(MessageItem, optional=("type",))
"""A message, whose type may be left out."""

_REASONING = inlined(ReasoningItem)
CALL_ITEMS = (FunctionCallItem, FunctionOutputItem, CustomCallItem, CustomOutputItem)


def _of_type(name: str, kind: type) -> Schema:
    """The schema of an object about a tool of this type."""
    return inlined(kind, type=only(name))


def _typed(*types: str, **more: Schema) -> Schema:
    """The schema of an object of one of these types with `more` members, which are required."""
    return {"type": "object", "properties": {"type": only(*types), **more}, "required": ["type", *more]}


TOOLS = (_of_type("function", FunctionTool), _of_type(CUSTOM, CustomTool))
NAMESPACE_TOOL = _typed(NAMESPACE, name={"type": "string"}, tools={"type": "array", "items": {"anyOf": [*TOOLS]}})

RESPONSE_RULES: dict[str, Schema] = {
    "input": {
        "anyOf": [
            NOT_EMPTY,
            {
                "type": "array",
                "items": {"anyOf": [_NO_TYPE, *map(inlined, CALL_ITEMS), _REASONING]},
                "contains": {"not": _REASONING},
                "minItems": 1,
                "maxItems": MAX_ITEMS,
            },
        ]
    },
    "tools": {
        "anyOf": [
            {"type": "null"},
            {"type": "array", "items": {"anyOf": [*TOOLS, NAMESPACE_TOOL, _typed(*sorted(NOT_OFFERED))]}},
        ]
    },
    "tool_choice": {
        "anyOf": [only(None, *TOOL_CHOICES), *(_of_type(kind, ToolChoiceFunction) for kind in ("function", CUSTOM))]
    },
    "text": {
        "anyOf": [
            {"type": "null"},
            inlined(TextOptions),
        ]
    },
    "previous_response_id": {"type": ["string", "null"], "pattern": RESPONSE_ID_PATTERN},
}
PROMPT_RULES = {name: RESPONSE_RULES[name] for name in RESPONSE_RULES if name in ResponsePrompt.__struct_fields__}


def _stored(
    path: str, summary: str, kind: type, *, methods: tuple[str, ...], parameters: tuple[Parameter, ...] = ()
) -> ApiEndpoint:
    """An endpoint of a stored response."""
    return account_endpoint(
        f"/v1/responses/{{id}}{path}",
        summary,
        kind,
        ErrorCode.NOT_FOUND,
        methods=methods,
        headers=("Cache-Control",),
        parameters=(Parameter("id", "path", "The id of a response.", NOT_EMPTY), *parameters),
    )


_RESPONSE = _stored(
    "",
    "A stored response; DELETE deletes it",
    ResponseDocument,
    methods=("GET", "HEAD", "DELETE"),
    parameters=(
        Parameter("stream", "query", "`true`: the events of a background response.", only("true", "false")),
        Parameter(
            "starting_after",
            "query",
            "The `sequence_number` of the last event that the client has; only with `stream=true`.",
            {"type": "integer", "minimum": 0, "maximum": 10**LONGEST_NUMBER - 1},
        ),
    ),
)
RESPONSES: tuple[ApiEndpoint, ...] = (
    inference_endpoint(
        "/v1/responses",
        ResponseBody,
        ResponseDocument,
        "Create a response (OpenAI format)",
        example={"model": "tiny", "input": "Hello!", "max_output_tokens": 16, "store": False},
        rules=RESPONSE_RULES | SERVICE_TIER,
        conditions=(BACKGROUND,),
        events=ResponseEvent,
        errors=frozenset({ErrorCode.NOT_FOUND}),
        description=(
            "`background: true` returns at once; GET /v1/responses/{id} returns the state and the result. Built-in tools "
            "are rejected by name."
        ),
    ),
    token_count_endpoint(
        "/v1/responses/input_tokens",
        "Estimate the tokens of an input (OpenAI format)",
        InputTokens,
        ErrorCode.NOT_FOUND,
        body=ResponsePrompt,
        example={"model": "tiny", "input": "Hello!"},
        rules=PROMPT_RULES,
    ),
    replace(
        _RESPONSE,
        responses={
            200: replace(_RESPONSE.responses[200], content={JSON: ResponseDocument, EVENTS: ResponseEvent}),
        },
    ),
    _stored("/cancel", "Cancel a background response", ResponseDocument, methods=("POST",)),
    _stored(
        "/input_items",
        "Items of the input of a stored response",
        ResponseItems,
        methods=READ_METHODS,
        parameters=PAGE_PARAMETERS,
    ),
)
