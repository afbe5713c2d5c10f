"""The description of every endpoint of a gateway: one `ApiEndpoint` for each route of `build_routes` (gateway/wiring.py).

All inference endpoints have the same errors, since they have the same pipeline. tests/architecture/test_openapi.py
compares this table with the routes, both ways.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.api import chat
from gateway.api.account_document import Account
from gateway.api.chat import ChatBody, ChatCompletion
from gateway.api.completions import Completion, CompletionBody
from gateway.api.embeddings import EmbeddingBody, Embeddings
from gateway.api.inference import InferenceBody, PlainAnswer, PlainBody, PredictBody, Prediction, Success
from gateway.api.models import ModelEntry, ModelList
from gateway.api.open_inference.endpoints import INFER
from gateway.api.open_inference.error_form import PlainError
from gateway.api.open_inference.metadata import ModelMetadata, ModelReady, ServerLive, ServerMetadata, ServerReady
from gateway.api.open_inference.rest_tensors import BINARY, JSON_LENGTH, TensorBody, TensorResponse
from gateway.api.open_inference.tensors import TEXT_INPUT, TEXT_OUTPUT
from gateway.api.stream_chunks import ChatChunk, CompletionChunk
from gateway.auth.authenticator import KEY_HEADER
from gateway.auth.service_tier import KNOWN
from gateway.http.response import JSON
from gateway.http.response_headers import Schema
from gateway.http.sse import EVENTS
from gateway.http.static import HTML
from gateway.jobs.results import JobResult, Promise
from gateway.openapi.batch_endpoints import BATCHES
from gateway.openapi.model import (
    LIMITS,
    NOT_EMPTY,
    READ,
    TOKEN_LIMITS,
    ApiEndpoint,
    Parameter,
    ResponseDescription,
    account_endpoint,
    inference_endpoint,
    inlined,
    only,
    probe_endpoint,
    static_page,
)
from gateway.openapi.operator_endpoints import ACTIONS, DASHBOARD, METRICS_PAGE, OPERATIONS
from gateway.operations.health.model import Liveness, Readiness
from gateway.translations.custom_tools import CUSTOM, NAMESPACE, NOT_OFFERED, CustomTool
from gateway.translations.message_endpoints import MessageError, TokenCount
from gateway.translations.message_events import Message, MessageEvent
from gateway.translations.messages import MessageBody, PromptBody
from gateway.translations.response_document import ResponseDocument, ResponseEvent
from gateway.translations.response_handlers import LONGEST_NUMBER, MOST, PAGE, InputTokens, ResponseItems
from gateway.translations.responses import (
    MAX_ITEMS,
    RESPONSE_ID_PATTERN,
    TOOL_CHOICES,
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
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import MAX_SUBMISSIONS

TEXTS: Schema = {
    "anyOf": [NOT_EMPTY, {"type": "array", "items": NOT_EMPTY, "minItems": 1, "maxItems": MAX_SUBMISSIONS}]
}
SERVICE_TIER = {"service_tier": only(None, *KNOWN)}
ONE_TOKEN_LIMIT: Schema = {
    "not": {
        "properties": {"max_tokens": {"type": "integer"}, "max_completion_tokens": {"type": "integer"}},
        "required": ["max_tokens", "max_completion_tokens"],
    }
}
"""`max_tokens` and `max_completion_tokens` exclude each other."""

STREAMED: Schema = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
ONE_PROMPT: Schema = {"not": {"allOf": [STREAMED, {"properties": {"prompt": {"type": "array", "minItems": 2}}}]}}
"""A stream has one prompt."""


def _of_type(name: str, kind: type) -> Schema:
    """The schema of an object about a tool of this type."""
    return inlined(kind, type=only(name))


def _typed(*types: str, **more: Schema) -> Schema:
    """The schema of an object of one of these types with `more` members, which are required."""
    return {"type": "object", "properties": {"type": only(*types), **more}, "required": ["type", *more]}


TOOLS = (_of_type("function", FunctionTool), _of_type(CUSTOM, CustomTool))
NAMESPACE_TOOL = _typed(NAMESPACE, name={"type": "string"}, tools={"type": "array", "items": {"anyOf": [*TOOLS]}})

_NO_TYPE = inlined(MessageItem, optional=("type",))
"""A message, whose type may be left out."""

_REASONING = inlined(ReasoningItem)
CALL_ITEMS = (FunctionCallItem, FunctionOutputItem, CustomCallItem, CustomOutputItem)
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
BACKGROUND: Schema = {
    "not": {
        "properties": {"background": {"const": True}, "store": {"const": False}},
        "required": ["background", "store"],
    }
}
"""`background` needs a stored response."""

INFERENCE = inference_endpoint(
    "/v1/inference",
    InferenceBody,
    Success,
    "Run a model",
    example={"input": "Once upon a time", "parameters": {"max_tokens": 16}},
    rules=SERVICE_TIER,
    parameters=(Parameter("Prefer", "header", "`respond-async` starts a job. Other preferences are ignored."),),
    responses={
        202: ResponseDescription(
            description="The job was accepted. Its result will be at `Location`.",
            content={JSON: Promise},
            headers=("x-request-id", "Location", "Preference-Applied", "Retry-After", *LIMITS),
            optional_headers=(*TOKEN_LIMITS, "Idempotent-Replayed"),
        )
    },
    description=(
        "With `Prefer: respond-async` the body may contain `callback_url`: an http or https URL of an allowed host. When "
        "the job ends, its result is sent there by POST, signed according to Standard Webhooks. It may also contain "
        "`priority`: `background`, the default, or `interactive` in tiers that allow it."
    ),
)

PAGE_PARAMETERS = (
    Parameter("limit", "query", f"Most items, {PAGE} by default.", {"type": "integer", "minimum": 1, "maximum": MOST}),
    Parameter("order", "query", "`desc`, the newest first, or `asc`.", only("asc", "desc")),
    Parameter("after", "query", "The id of the last item of the page before."),
)


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
COUNT_ERRORS = (
    ErrorCode.MODEL_NOT_FOUND,
    ErrorCode.REQUEST_TOO_LARGE,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE,
    ErrorCode.UNSUPPORTED_ENCODING,
    ErrorCode.DRAINING,
)
ESTIMATE = (
    "The estimate that admission charges for the prompt until the model has counted: a token for each four bytes, 1,000 "
    "for an image or a document."
)
API: tuple[ApiEndpoint, ...] = (
    INFERENCE,
    account_endpoint(
        "/v1/result/{id}",
        "State and result of a job; DELETE cancels it",
        JobResult,
        ErrorCode.NOT_FOUND,
        methods=("GET", "HEAD", "DELETE"),
        headers=("Cache-Control",),
        optional_headers=("Retry-After",),
        parameters=(Parameter("id", "path", "The id of a job, from `task_id`.", NOT_EMPTY),),
    ),
    inference_endpoint(
        "/v1/predict",
        PredictBody,
        Prediction,
        "Run a model, with other field names",
        example={"model_id": "tiny", "input_data": "Once upon a time"},
    ),
    inference_endpoint(
        "/api/inference", PlainBody, PlainAnswer, "Run the default model", example={"input": "Once upon a time"}
    ),
    inference_endpoint(
        "/v1/completions",
        CompletionBody,
        Completion,
        "Complete prompts (OpenAI format)",
        example={"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16},
        rules={"prompt": TEXTS} | SERVICE_TIER,
        conditions=(ONE_PROMPT,),
        events=CompletionChunk,
    ),
    inference_endpoint(
        "/v1/chat/completions",
        ChatBody,
        ChatCompletion,
        "Continue a conversation (OpenAI format)",
        example={"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}], "max_completion_tokens": 16},
        rules=SERVICE_TIER | {name: only(*each) for name, each in chat.ACCEPTED.items()},
        conditions=(ONE_TOKEN_LIMIT,),
        events=ChatChunk,
    ),
    inference_endpoint(
        "/v1/embeddings",
        EmbeddingBody,
        Embeddings,
        "Compute the vectors of texts (OpenAI format)",
        example={"model": "tiny", "input": "Once upon a time"},
        rules={"input": TEXTS} | SERVICE_TIER,
    ),
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
    account_endpoint(
        "/v1/responses/input_tokens",
        "Estimate the tokens of an input (OpenAI format)",
        InputTokens,
        *COUNT_ERRORS,
        ErrorCode.NOT_FOUND,
        methods=("POST",),
        body=ResponsePrompt,
        example={"model": "tiny", "input": "Hello!"},
        rules=PROMPT_RULES,
        description=ESTIMATE,
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
        methods=READ,
        parameters=PAGE_PARAMETERS,
    ),
    account_endpoint("/v1/models", "List the models", ModelList),
    account_endpoint(
        "/v1/models/{id...}",
        "Read one model",
        ModelEntry,
        ErrorCode.MODEL_NOT_FOUND,
        parameters=(Parameter("id", "path", "The name of the model, which may contain slashes.", NOT_EMPTY),),
    ),
    account_endpoint("/v1/me", "Current limits, what is left, usage of 24 hours", Account, headers=("Cache-Control",)),
)

MESSAGE_PARAMETERS = (
    Parameter(KEY_HEADER, "header", "The API key, if there is no `Authorization`."),
    Parameter("anthropic-version", "header", "Accepted, and without effect."),
)
TOOLS_FOR_CHOICE: Schema = {
    "anyOf": [
        {"properties": {"tools": {"type": "array", "minItems": 1}}, "required": ["tools"]},
        {"properties": {"tool_choice": {"anyOf": [{"type": "null"}, {"properties": {"type": only("auto", "none")}}]}}},
    ]
}
"""A choice that forces a call requires tools."""

MESSAGE_EXAMPLE: Mapping[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}]}
ANTHROPIC: tuple[ApiEndpoint, ...] = (
    inference_endpoint(
        "/v1/messages",
        MessageBody,
        Message,
        "Continue a conversation (Anthropic format)",
        example={"max_tokens": 16, **MESSAGE_EXAMPLE},
        rules={
            "service_tier": only(None, "standard_only", *KNOWN),
            "thread": only(None),
            "top_k": only(None, -1, 0) | {"description": "Any integer for a model with an endpoint."},
        },
        conditions=(TOOLS_FOR_CHOICE,),
        events=MessageEvent,
        parameters=MESSAGE_PARAMETERS,
    ),
    account_endpoint(
        "/v1/messages/count_tokens",
        "Estimate the tokens of a prompt (Anthropic format)",
        TokenCount,
        *COUNT_ERRORS,
        methods=("POST",),
        body=PromptBody,
        example=MESSAGE_EXAMPLE,
        conditions=(TOOLS_FOR_CHOICE,),
        parameters=MESSAGE_PARAMETERS,
        description=ESTIMATE,
    ),
)
BESIDE: Mapping[str, tuple[str, ...]] = {
    "x-request-id": ("request-id",),
    "x-ratelimit-limit-requests": tuple(
        f"anthropic-ratelimit-requests-{part}" for part in ("limit", "remaining", "reset")
    ),
    "x-ratelimit-limit-tokens": tuple(f"anthropic-ratelimit-tokens-{part}" for part in ("limit", "remaining", "reset")),
}
"""Our headers -> Anthropic's."""
MODEL_NAME = Parameter(
    "id",
    "path",
    "The name of the model, which may contain slashes; `/versions/1` may follow. There are no other versions.",
    NOT_EMPTY,
)
_TENSORS = inference_endpoint(
    INFER,
    TensorBody,
    TensorResponse,
    "Run a model on a tensor of texts (Open Inference Protocol)",
    example={
        "inputs": [{"name": TEXT_INPUT, "datatype": "BYTES", "shape": [1], "data": ["Once upon a time"]}],
        "parameters": {"max_tokens": 16},
    },
    parameters=(MODEL_NAME,),
    description=(
        f"The input tensor is `{TEXT_INPUT}`, the output tensor `{TEXT_OUTPUT}`: BYTES with shape [N] or [N, 1], of N texts. "
        f"With the header `{JSON_LENGTH}` the data may be binary, behind the JSON."
    ),
)
TENSORS: tuple[ApiEndpoint, ...] = (
    replace(
        _TENSORS,
        responses={
            200: replace(
                _TENSORS.responses[200],
                content={JSON: TensorResponse, BINARY: Any},
                optional_headers=(*_TENSORS.responses[200].optional_headers, JSON_LENGTH),
            )
        },
    ),
    account_endpoint(
        "/v2/models/{id...}",
        "Read the tensors of a model (Open Inference Protocol)",
        ModelMetadata,
        ErrorCode.MODEL_NOT_FOUND,
        parameters=(MODEL_NAME,),
    ),
    account_endpoint(
        "/v2/models/{id...}/ready",
        "Readiness of a model (Open Inference Protocol)",
        ModelReady,
        ErrorCode.MODEL_NOT_FOUND,
        parameters=(MODEL_NAME,),
    ),
    probe_endpoint("/v2", "Name and version of the server", {200: ("The server.", ServerMetadata)}),
    probe_endpoint("/v2/health/live", "Liveness of the process", {200: ("The process is alive.", ServerLive)}),
    probe_endpoint(
        "/v2/health/ready",
        "Readiness for traffic",
        {200: ("Ready.", ServerReady), 503: ("Not ready.", ServerReady)},
    ),
)
"""The Open Inference Protocol, whose errors have a form of their own."""
ENDPOINTS: tuple[ApiEndpoint, ...] = (
    *API,
    *BATCHES,
    *(replace(endpoint, error=MessageError, beside=BESIDE) for endpoint in ANTHROPIC),
    *(replace(endpoint, error=PlainError) for endpoint in TENSORS),
    *OPERATIONS,
    *DASHBOARD,
    *ACTIONS,
    probe_endpoint("/livez", "Liveness of the process", {200: ("The process is alive.", Liveness)}),
    *(
        probe_endpoint(path, summary, {200: ("Ready.", Readiness), 503: ("Not ready, with the reason.", Readiness)})
        for path, summary in (
            ("/readyz", "Readiness for traffic"),
            ("/health", "The same, at the path of vLLM's server"),
        )
    ),
    METRICS_PAGE,
    static_page("/", "Introduction", HTML),
    static_page("/docs", "This reference", HTML),
    static_page("/openapi.json", "This description as OpenAPI", JSON, kind=dict[str, Any]),
)
