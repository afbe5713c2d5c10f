"""The description of `/v1/messages` in Anthropic's format."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.auth.authenticator import KEY_HEADER
from gateway.auth.service_tier import KNOWN
from gateway.http.response_headers import Schema
from gateway.openapi.endpoint_kinds import inference_endpoint, token_count_endpoint
from gateway.openapi.model import ApiEndpoint, Parameter
from gateway.openapi.schemas import only
from gateway.translations.message_body import MessageBody, PromptBody
from gateway.translations.message_endpoints import MessageError, TokenCount
from gateway.translations.message_events import Message, MessageEvent

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
BESIDE: Mapping[str, tuple[str, ...]] = {
    "x-request-id": ("request-id",),
    "x-ratelimit-limit-requests": tuple(
        f"anthropic-ratelimit-requests-{part}" for part in ("limit", "remaining", "reset")
    ),
    "x-ratelimit-limit-tokens": tuple(f"anthropic-ratelimit-tokens-{part}" for part in ("limit", "remaining", "reset")),
}
"""Our headers -> Anthropic's."""

MESSAGES: tuple[ApiEndpoint, ...] = tuple(
    replace(endpoint, error=MessageError, beside=BESIDE)
    for endpoint in (
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
        token_count_endpoint(
            "/v1/messages/count_tokens",
            "Estimate the tokens of a prompt (Anthropic format)",
            TokenCount,
            body=PromptBody,
            example=MESSAGE_EXAMPLE,
            conditions=(TOOLS_FOR_CHOICE,),
            parameters=MESSAGE_PARAMETERS,
        ),
    )
)
