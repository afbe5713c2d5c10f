"""The document of a response of `POST /v1/responses`: most members repeat its request."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.auth.service_tier import response_tier
from gateway.translations.response_body import PlainFormat, TextOptions
from gateway.translations.response_id import response_id
from gateway.translations.responses import ResponsesRequest
from scheduler.request_id import created_ms

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class CachedTokens(msgspec.Struct, gc=False):
    """Details of the input's tokens, from the model's server."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct, gc=False):
    """Details of the output's tokens, from the model's server."""

    reasoning_tokens: int = 0


class ResponseTokens(msgspec.Struct, gc=False):
    """Tokens of the response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseFault(msgspec.Struct, gc=False):
    """Why a response failed. `type` is the error code of docs/errors.md."""

    code: str
    message: str
    type: str


class IncompleteDetails(msgspec.Struct, gc=False):
    """Why the output ends early."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseDocument(msgspec.Struct, kw_only=True, gc=False):
    """The response. Most members repeat the request; `created_at` is Unix time in seconds, from the id."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[dict[str, Any]] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseTokens | None = None
    user: str | None
    metadata: dict[str, str]
    deleted: bool | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, gc=False):
    """An event of a stream, with the members of its type. The last one has the whole response."""

    type: str
    sequence_number: int


def started(request_id: str, model: str, request: ResponsesRequest, status: Status = "in_progress") -> ResponseDocument:
    """The response before there is an output."""
    body = request.original
    effort = None if body.reasoning is None else body.reasoning.effort
    options = body.text or TextOptions()
    text = {"format": msgspec.to_builtins(options.format or PlainFormat())}
    if options.verbosity is not None:
        text["verbosity"] = options.verbosity
    return ResponseDocument(
        id=response_id(request_id),
        created_at=created_ms(request_id) // 1000,
        status=status,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": effort, "summary": None},
        service_tier=response_tier(body.service_tier),
        store=body.store is not False,
        temperature=body.temperature,
        text=text,
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )
