"""The description of an endpoint: what it accepts and returns, its errors and headers.

The table is gateway/openapi/endpoints.py. Types are those that decode and encode, so document and behaviour cannot
differ. A new response header is one entry in gateway/http/response_headers.py; building the document fails for a header
that is not there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from gateway.http.body.absent_members import NOTHING
from gateway.http.error_responses import ErrorBody
from gateway.http.response import JSON
from gateway.http.response_headers import RESPONSE_HEADERS, Schema
from gateway.http.sse import EVENTS
from gateway.http.static import page_headers
from gateway.inference.idempotency import IDEMPOTENCY_KEY, MAX_KEY_CHARACTERS
from scheduler.errors import ErrorCode

LIMITS = (
    "RateLimit-Policy",
    "RateLimit",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
)
"""Headers of every response to an authenticated customer."""

TOKEN_LIMITS = ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")
"""Headers that are added if the customer has a limit of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseDescription:
    """A response that is not an error. `content`: media type -> type of the body. `optional_headers` may be absent."""

    description: str
    content: Mapping[str, Any] = field(default_factory=dict)
    headers: tuple[str, ...] = ("x-request-id",)
    optional_headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A request header, a part of the path, or a parameter of the query."""

    name: str
    place: Literal["header", "path", "query"]
    description: str
    schema: Schema = field(default_factory=lambda: {"type": "string"})

    def document(self) -> Schema:
        """The parameter object. A part of the path is required."""
        required = {"required": True} if self.place == "path" else {}
        return {"name": self.name, "in": self.place, "description": self.description, **required, "schema": self.schema}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiEndpoint:
    """One path, or some of its methods. Methods that differ only in whether they return a body (GET and HEAD) share a description.

    `errors` are all codes that it can return, including those from before its handler; `error` is their body. `body` is the
    struct that decodes; `rules` and `conditions` describe what is checked after decoding: schemas of single fields, and of
    combinations. `beside`: a header -> those that its API sends with the same meaning.
    """

    path: str
    methods: tuple[str, ...]
    tag: str
    summary: str
    responses: Mapping[int, ResponseDescription]
    errors: frozenset[ErrorCode]
    token: Literal["key", "service"] | None = None
    error: type = ErrorBody
    body: type | None = None
    media: str = JSON  # Of the body.
    example: Mapping[str, Any] | None = None
    rules: Mapping[str, Schema] = field(default_factory=dict)
    conditions: tuple[Schema, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    description: str = ""
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def template(self) -> str:
        """The path in OpenAPI's syntax, which has no form for a part that may contain slashes."""
        return self.path.replace("...}", "}")

    def types(self) -> list[Any]:
        """The types of all bodies."""
        types = [kind for response in self.responses.values() for kind in response.content.values()]
        return [*([] if self.body is None else [self.body]), self.error, *types]


READ = ("GET", "HEAD")
ANY_PATH = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.METHOD_NOT_ALLOWED,
        ErrorCode.REQUEST_TIMEOUT,
        ErrorCode.NO_CAPACITY,
        ErrorCode.INTERNAL_ERROR,
    }
)
"""Errors of the server itself, at any path: invalid HTTP, wrong method, too slow, too many connections, a fault."""

SERVICE = ANY_PATH | {ErrorCode.INVALID_API_KEY, ErrorCode.RATE_LIMIT_EXCEEDED}
CUSTOMER = SERVICE | {
    ErrorCode.ACCOUNT_SUSPENDED,
    ErrorCode.CATALOG_UNAVAILABLE,
    ErrorCode.TOO_MANY_CONNECTIONS,
}
NOT_INFERENCE = frozenset({ErrorCode.NOT_FOUND, ErrorCode.ABANDONED, ErrorCode.CROSS_SITE, ErrorCode.CHANGED_MEANWHILE})
"""Errors that no inference endpoint returns. `abandoned` is in audit rows only."""

NOT_EMPTY: Schema = {"type": "string", "minLength": 1}
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
TRACEPARENT = Parameter("traceparent", "header", "W3C trace context; the trace id is stored in the audit row.")


def only(*values: Any) -> Schema:
    """The rule of a field that accepts these values and no others."""
    return {"enum": list(values)}


def with_absent(schema: Any) -> Any:
    """The schema, where each object without other members may have members that ask for nothing."""
    if isinstance(schema, list):
        return [with_absent(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: with_absent(value) for name, value in schema.items()}
    if found.get("additionalProperties") is False:
        found["additionalProperties"] = {"enum": list(NOTHING)}
    return found


def inlined(kind: type, *, optional: tuple[str, ...] = (), **rules: Schema) -> Schema:
    """The schema of a type without references, for a part of a body that is decoded later.

    `optional`: fields that may be absent beside the type's own. `rules`: field -> its schema instead of the type's.
    """
    (schema,), components = msgspec.json.schema_components([kind], ref_template="{name}")

    def resolved(part: Any) -> Any:
        if isinstance(part, list):
            return [resolved(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return resolved(components[part["$ref"]])
        return {name: resolved(value) for name, value in part.items() if name != "discriminator"}

    found: dict[str, Any] = with_absent(resolved(schema))
    found["properties"] |= rules
    found["required"] = [name for name in found["required"] if name not in optional]
    return found


def inference_endpoint(
    path: str,
    body: type,
    result: Any,
    summary: str,
    *,
    example: Mapping[str, Any],
    rules: Mapping[str, Schema] = {},
    conditions: tuple[Schema, ...] = (),
    events: Any = None,
    parameters: tuple[Parameter, ...] = (),
    responses: Mapping[int, ResponseDescription] = {},
    description: str = "",
    errors: frozenset[ErrorCode] = frozenset(),
) -> ApiEndpoint:
    """An endpoint in one API format. `events`: the type of a stream's event, None if it cannot stream.

    `errors`: those that other formats do not have.
    """
    completed = ResponseDescription(
        description="Completed.",
        content={JSON: result} if events is None else {JSON: result, EVENTS: events},
        headers=("x-request-id", *LIMITS) if events else ("x-request-id", "Server-Timing", *LIMITS),
        optional_headers=(
            *TOKEN_LIMITS,
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
        example=example,
        rules=rules,
        conditions=conditions,
        parameters=(IDEMPOTENCY_KEY_PARAMETER, TRACEPARENT, *parameters),
        responses={200: completed, **responses},
        errors=frozenset(ErrorCode) - NOT_INFERENCE | errors,
        description=description,
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
        headers=("x-request-id", *headers, *LIMITS),
        optional_headers=(*optional_headers, *TOKEN_LIMITS),
    )
    defaults: dict[str, Any] = {"methods": READ, "tag": "account", "token": "key", "errors": CUSTOMER | set(errors)}
    return ApiEndpoint(path=path, summary=summary, **({"responses": {200: found}} | defaults | fields))


def static_page(path: str, summary: str, *media: str, kind: Any = str, **fields: Any) -> ApiEndpoint:
    """A page that is the same for all clients."""
    headers = ("x-request-id", "ETag", *(name for name, _ in page_headers(media[0])))
    found = ResponseDescription(description="The page.", content=dict.fromkeys(media, kind), headers=headers)
    unchanged = ResponseDescription(description="The client has this version (If-None-Match).", headers=headers)
    etag = Parameter("If-None-Match", "header", "The ETag of the client's copy.")
    defaults: dict[str, Any] = {"methods": READ, "tag": "pages", "errors": ANY_PATH}
    parameters = (etag, *fields.pop("parameters", ()))
    return ApiEndpoint(
        path=path,
        summary=summary,
        parameters=parameters,
        responses={200: found, 304: unchanged},
        **(defaults | fields),
    )


def probe_endpoint(path: str, summary: str, responses: Mapping[int, tuple[str, Any]]) -> ApiEndpoint:
    """An endpoint for load balancers. `responses`: status -> description and type."""
    found = {
        status: ResponseDescription(description=description, content={JSON: kind})
        for status, (description, kind) in responses.items()
    }
    return ApiEndpoint(path=path, methods=READ, tag="operations", summary=summary, responses=found, errors=ANY_PATH)


def operator_endpoint(
    path: str, summary: str, responses: Mapping[int, tuple[str, Any]], *errors: ErrorCode, **fields: Any
) -> ApiEndpoint:
    """An endpoint that needs the service token. `responses`: status -> description, and type or content."""
    found = {
        status: ResponseDescription(
            description=description,
            content=kind if isinstance(kind, Mapping) else {JSON: kind},
            headers=("x-request-id", "Cache-Control"),
        )
        for status, (description, kind) in responses.items()
    }
    defaults: dict[str, Any] = {
        "methods": ("GET",),
        "tag": "operations",
        "token": "service",
        "errors": SERVICE | set(errors),
    }
    return ApiEndpoint(path=path, summary=summary, responses=found, **(defaults | fields))


OPTIONAL = "-if-known"
"""The suffix of the component of a header that may be absent: a reference cannot express that."""


def header_component(name: str) -> Schema:
    """The header object of a component's name. Raises KeyError for a header without a description."""
    header = RESPONSE_HEADERS[name.removesuffix(OPTIONAL)]
    required = not name.endswith(OPTIONAL)
    return {
        "description": header.description,
        "required": required,
        "schema": header.schema,
        "example": header.example,
    }
