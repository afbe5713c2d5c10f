"""The kinds of endpoints: inference, account, static page, probe and operator, each with its methods, errors and headers."""

from collections.abc import Mapping
from typing import Any

from gateway.auth.service_tier import KNOWN
from gateway.http.pages import ANY_ID
from gateway.http.response import JSON
from gateway.http.sse import EVENTS
from gateway.http.static import page_headers
from gateway.inference.idempotency import IDEMPOTENCY_KEY, MAX_KEY_CHARACTERS
from gateway.openapi.model import ApiEndpoint, Parameter, ResponseDescription
from gateway.openapi.schemas import only
from scheduler.errors import ErrorCode

LIMIT_HEADERS = (
    "RateLimit-Policy",
    "RateLimit",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
)
"""Headers of every response to an authenticated customer."""

TOKEN_LIMIT_HEADERS = ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")
"""Headers that are added if the customer has a limit of tokens."""

READ_METHODS = ("GET", "HEAD")
ANY_PATH_ERRORS = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.METHOD_NOT_ALLOWED,
        ErrorCode.REQUEST_TIMEOUT,
        ErrorCode.NO_CAPACITY,
        ErrorCode.INTERNAL_ERROR,
    }
)
"""Errors of the server itself, at any path: invalid HTTP, wrong method, too slow, too many connections, a fault."""

SERVICE_ERRORS = ANY_PATH_ERRORS | {ErrorCode.INVALID_API_KEY, ErrorCode.RATE_LIMIT_EXCEEDED}
CUSTOMER_ERRORS = SERVICE_ERRORS | {
    ErrorCode.ACCOUNT_SUSPENDED,
    ErrorCode.CATALOG_UNAVAILABLE,
    ErrorCode.TOO_MANY_CONNECTIONS,
}
"""Errors that occur before the customer is known."""

ADMIN_ERRORS = frozenset(
    {
        ErrorCode.CONFLICT,
        ErrorCode.PRECONDITION_FAILED,
        ErrorCode.SIGN_IN_FAILED,
        ErrorCode.IDENTITY_PROVIDER_UNAVAILABLE,
    }
)
"""Errors that only the admin API returns."""

NOT_INFERENCE_ERRORS = ADMIN_ERRORS | {
    ErrorCode.NOT_FOUND,
    ErrorCode.ABANDONED,
    ErrorCode.CROSS_SITE,
    ErrorCode.CHANGED_MEANWHILE,
    ErrorCode.PERMISSION_DENIED,
}
"""Errors that no inference endpoint returns. `abandoned` is in audit rows only."""

IDEMPOTENCY_KEY_PARAMETER = Parameter(
    IDEMPOTENCY_KEY,
    "header",
    "Identifies this request: a retry with the same body gets the stored response, usually for 24 hours.",
    {
        "type": "string",
        "pattern": r'^("([!#-\[\]-~]|\\["\\])+"|[!#-~][!-~]*)$',
        "minLength": 1,
        "maxLength": MAX_KEY_CHARACTERS,
    },
)
SERVICE_TIER = {"service_tier": only(None, *KNOWN)}
"""The rule of the field in OpenAI's formats and our own."""

TRACEPARENT = Parameter("traceparent", "header", "W3C trace context; the trace id is stored in the audit row.")


def inference_endpoint(
    path: str,
    body: type,
    result: Any,
    summary: str,
    *,
    events: Any = None,
    parameters: tuple[Parameter, ...] = (),
    responses: Mapping[int, ResponseDescription] = {},
    errors: frozenset[ErrorCode] = frozenset(),
    **fields: Any,
) -> ApiEndpoint:
    """An endpoint in one API format. `events`: the type of a stream's event, None if it cannot stream.

    `errors`: those that other formats do not have.
    """
    completed = ResponseDescription(
        description="Completed.",
        content={JSON: result} if events is None else {JSON: result, EVENTS: events},
        headers=("x-request-id", *LIMIT_HEADERS) if events else ("x-request-id", "Server-Timing", *LIMIT_HEADERS),
        optional_headers=(
            *TOKEN_LIMIT_HEADERS,
            "Idempotent-Replayed",
            "Cache-Status",
            *(("Server-Timing", "Cache-Control") if events else ()),  # One in JSON responses, the other in streams.
        ),
    )
    return ApiEndpoint(
        path=path,
        methods=("POST",),
        tag="inference",
        summary=summary,
        token="key",  # noqa: S106  # the kind of token
        body=body,
        parameters=(IDEMPOTENCY_KEY_PARAMETER, TRACEPARENT, *parameters),
        responses={200: completed, **responses},
        errors=frozenset(ErrorCode) - NOT_INFERENCE_ERRORS | errors,
        **fields,
    )


def account_endpoint(
    path: str,
    summary: str,
    kind: Any,
    *errors: ErrorCode,
    headers: tuple[str, ...] = (),
    optional_headers: tuple[str, ...] = (),
    **fields: Any,
) -> ApiEndpoint:
    """An endpoint where a customer reads something, free of charge."""
    found = ResponseDescription(
        description="Found.",
        content={JSON: kind},
        headers=("x-request-id", *headers, *LIMIT_HEADERS),
        optional_headers=(*optional_headers, *TOKEN_LIMIT_HEADERS),
    )
    defaults: dict[str, Any] = {
        "methods": READ_METHODS,
        "tag": "account",
        "token": "key",
        "errors": CUSTOMER_ERRORS | set(errors),
    }
    return ApiEndpoint(path=path, summary=summary, **({"responses": {200: found}} | defaults | fields))


def page_parameters(default: int, most: int, ids: str = ANY_ID) -> tuple[Parameter, ...]:
    """The parameters that `read_page` of gateway/http/pages.py reads."""
    limit = Parameter(
        "limit", "query", f"Most items, {default} by default.", {"type": "integer", "minimum": 1, "maximum": most}
    )
    return limit, Parameter(
        "after", "query", "The id of the last item of the page before.", {"type": "string", "pattern": ids}
    )


def token_count_endpoint(path: str, summary: str, kind: type, *errors: ErrorCode, **fields: Any) -> ApiEndpoint:
    """An endpoint that estimates the tokens of a prompt, free of charge."""
    return account_endpoint(
        path,
        summary,
        kind,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.REQUEST_TOO_LARGE,
        ErrorCode.UNSUPPORTED_MEDIA_TYPE,
        ErrorCode.UNSUPPORTED_ENCODING,
        ErrorCode.DRAINING,
        *errors,
        methods=("POST",),
        description=(
            "The estimate that admission charges for the prompt until the model has counted: a token for each four bytes, "
            "1,000 for an image or a document."
        ),
        **fields,
    )


def static_page(path: str, summary: str, *media: str, kind: Any = str, **fields: Any) -> ApiEndpoint:
    """A page that is the same for all clients."""
    headers = ("x-request-id", "ETag", *(name for name, _ in page_headers(media[0])))
    found = ResponseDescription(description="The page.", content=dict.fromkeys(media, kind), headers=headers)
    unchanged = ResponseDescription(description="The client has this version (If-None-Match).", headers=headers)
    etag = Parameter("If-None-Match", "header", "The ETag of the client's copy.")
    defaults: dict[str, Any] = {"methods": READ_METHODS, "tag": "pages", "errors": ANY_PATH_ERRORS}
    parameters = (etag, *fields.pop("parameters", ()))
    return ApiEndpoint(
        path=path,
        summary=summary,
        parameters=parameters,
        responses={200: found, 304: unchanged},
        **(defaults | fields),
    )


def operator_endpoint(
    path: str,
    summary: str,
    responses: Mapping[int, tuple[str, Any]],
    *errors: ErrorCode,
    headers: tuple[str, ...] = ("x-request-id", "Cache-Control"),
    **fields: Any,
) -> ApiEndpoint:
    """An endpoint that needs the service token. `responses`: status -> description, and type or content."""
    found = {
        status: ResponseDescription(
            description=description, content=kind if isinstance(kind, Mapping) else {JSON: kind}, headers=headers
        )
        for status, (description, kind) in responses.items()
    }
    defaults: dict[str, Any] = {
        "methods": ("GET",),
        "tag": "operations",
        "token": "service",
        "errors": SERVICE_ERRORS | set(errors),
    }
    return ApiEndpoint(path=path, summary=summary, responses=found, **(defaults | fields))


def probe_endpoint(
    path: str, summary: str, responses: Mapping[int, tuple[str, Any]], headers: tuple[str, ...] = ("x-request-id",)
) -> ApiEndpoint:
    """An endpoint for load balancers and monitoring, without a token. `responses`: as of `operator_endpoint`."""
    fields: dict[str, Any] = {"methods": READ_METHODS, "token": None, "errors": ANY_PATH_ERRORS}
    return operator_endpoint(path, summary, responses, headers=headers, **fields)
