"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: their errors, headers, and the estimate of tokens.

Both accept the key as `x-api-key` too, and ignore `anthropic-version`, as there is one version.
"""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceResult
from gateway.api.inference import ApiFormat, completed
from gateway.auth.authenticator import KEY_HEADER
from gateway.http.error_responses import ResponseForm
from gateway.http.response import HttpResponse, encode_json
from gateway.http.router import RoutedRequest
from gateway.inference.call import InferenceCall
from gateway.inference.entry import Entry
from gateway.inference.token_count import token_count
from gateway.translations.message_events import MessageChunks, message_of
from gateway.translations.messages import CLIENT_FIELDS, THREAD, read_messages, read_prompt
from scheduler.context_length import read_overflow
from scheduler.errors import HTTP, ErrorCode, RequestError

UNSUPPORTED_THREAD = "thread_unsupported_request"
DetailCode = Annotated[str, msgspec.Meta(extra_json_schema={"enum": [*ErrorCode, UNSUPPORTED_THREAD]})]
ErrorKind = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "conflict_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]
_KINDS: dict[int, ErrorKind] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_LIMIT = re.compile(r"x-ratelimit-limit-(requests|tokens): (\d+)")
_LEFT = re.compile(r'"(requests|tokens)";r=(\d+);t=(\d+)')


class MessageFaultDetails(msgspec.Struct, gc=False):
    """Tierlane's code, or Anthropic's for a stored conversation; the invalid field; and the wait before a retry."""

    error_code: DetailCode
    param: str | None
    retry_after_ms: int | UnsetType = UNSET


class MessageFault(msgspec.Struct, gc=False):
    """The error object: Anthropic's type by status, and the message."""

    type: ErrorKind
    message: str
    details: MessageFaultDetails


class MessageError(msgspec.Struct, gc=False, tag_field="type", tag="error"):
    """The body of an error, and the last event of a stream that failed, in Anthropic's form."""

    error: MessageFault
    request_id: str


def error_body(error: RequestError, request_id: str, retry_after_ms: int | UnsetType = UNSET) -> MessageError:
    """The body for a request error."""
    status = HTTP[error.code].status
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    code = UNSUPPORTED_THREAD if error.param == THREAD else error.code
    details = MessageFaultDetails(code, error.param, retry_after_ms)
    message = error.message
    if error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED and (overflow := read_overflow(message)):
        message = overflow.prompt_too_long()
    return MessageError(MessageFault(kind, message, details), request_id)


def header_lines(request_id: str, lines: str) -> str:
    """The headers that Anthropic's clients read, from those in `lines`. A reset is the time when a limit is full again."""
    limits = dict(_LIMIT.findall(lines))
    text = f"request-id: {request_id}\r\n"
    for name, left, seconds in _LEFT.findall(lines):
        reset = datetime.now(UTC) + timedelta(seconds=int(seconds))
        prefix = f"anthropic-ratelimit-{name}"
        text += f"{prefix}-limit: {limits[name]}\r\n{prefix}-remaining: {left}\r\n"
        text += f"{prefix}-reset: {reset:%Y-%m-%dT%H:%M:%SZ}\r\n"
    return text


MESSAGE_FORM = ResponseForm(error_body, header_lines)


def write_message(result: InferenceResult) -> HttpResponse:
    """Write the response to a completed request. Raises RequestError if the server's output cannot be read."""
    reply = result.replies[0]
    body = encode_json(message_of(reply, result.request, result.model))
    return completed(reply, body, result.latency_ms, result.lines + header_lines(reply.id, result.lines))


MESSAGES = ApiFormat(
    read_messages,
    write_message,
    "messages",
    flat=True,
    chunks=MessageChunks,
    endpoint="/v1/messages",
    names=CLIENT_FIELDS,
    key_header=KEY_HEADER,
    form=MESSAGE_FORM,
)
COUNT = replace(MESSAGES, read=read_prompt, chunks=None, endpoint="/v1/messages/count_tokens")


class TokenCount(msgspec.Struct, gc=False):
    """The response body of `count_tokens`."""

    input_tokens: int


class CountTokens:
    """The handler of `count_tokens`, free of charge. The model is not called: the count is the estimate of admission."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    async def __call__(self, request: RoutedRequest) -> HttpResponse:
        """Handle one request. Raises RequestError if the caller is unknown; other errors become responses."""
        call = self._entry.call(COUNT, request)
        return await self._entry.answered(call, self._count(call, request))

    async def _count(self, call: InferenceCall, request: RoutedRequest) -> HttpResponse:
        call.body = COUNT.read(await self._entry.read(call, request), self._entry.largest().input_bytes)
        return token_count(self._entry, call, TokenCount)
