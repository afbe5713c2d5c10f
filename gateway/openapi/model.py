"""How an endpoint is described: what it takes, what it returns, its errors and headers.

The table is gateway/openapi/endpoints.py. Types are those that decode and encode, so the description cannot promise
another form than the one that is checked. A new header is one line here; a response that names a header which is not
here cannot be described, and a test says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.http.response import JSON
from gateway.http.static import page_headers
from gateway.inference.submission import HEADER, MAX_CHARACTERS
from scheduler.errors import ErrorCode

Schema = dict[str, Any]
Token = Literal["key", "service"]

LIMITS = (
    "RateLimit-Policy",
    "RateLimit",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
)
"""With every answer to a customer who is known,"""

TOKEN_LIMITS = ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")
"""and these where its tokens have a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTexts:
    """An answer that is no error. `content`: media type -> the type of the body; `headers` always, `sometimes` not always."""

    sentence: str
    content: Mapping[str, Any] = field(default_factory=dict)
    headers: tuple[str, ...] = ()
    sometimes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A header or a part of the path that a client sends."""

    name: str
    place: Literal["header", "path", "query"]
    sentence: str
    schema: Schema = field(default_factory=lambda: {"type": "string"})

    def document(self) -> Schema:
        """The parameter object. A part of the path is always there."""
        required = {"required": True} if self.place == "path" else {}
        return {"name": self.name, "in": self.place, "description": self.sentence, **required, "schema": self.schema}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiEndpoint:
    """One address. `methods` that are told apart by nothing but the body (GET and HEAD) share a description.

    `body` is the struct that decodes; `rules` narrows its fields to what is checked after decoding,
    `conditions` say what fields must not be together. `wants` says which
    token, if any. `errors` are all codes that it can answer, also those that come from before its handler.
    """

    path: str
    methods: tuple[str, ...]
    tag: str
    summary: str
    answers: Mapping[int, EndpointTexts]
    errors: frozenset[ErrorCode]
    wants: Token | None = None
    body: type | None = None
    example: Mapping[str, Any] | None = None
    rules: Mapping[str, Schema] = field(default_factory=dict)
    conditions: tuple[Schema, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    text: str = ""

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it: it has no sign for a part that may hold slashes."""
        return self.path.replace("...}", "}")

    def types(self) -> list[Any]:
        """Every type that its bodies have."""
        told = [kind for says in self.answers.values() for kind in says.content.values()]
        return told if self.body is None else [self.body, *told]


def only(*values: Any) -> Schema:
    """The rule of a field that takes these values and no others."""
    return {"enum": list(values)}


def in_json(kind: Any) -> dict[str, Any]:
    """The content of an answer with one JSON body."""
    return {JSON: kind}


EVENT_STREAM = "text/event-stream"
READ = ("GET", "HEAD")
OF_EITHER = ("Server-Timing", "Cache-Control")
"""Headers that either the JSON or the stream has."""

ANYWHERE = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.METHOD_NOT_ALLOWED,
        ErrorCode.REQUEST_TIMEOUT,
        ErrorCode.NO_CAPACITY,
        ErrorCode.INTERNAL_ERROR,
    }
)
"""What the edge answers at any address: no HTTP, another method, too slow, too many connections, a fault of ours."""

SERVICE = ANYWHERE | {ErrorCode.INVALID_API_KEY, ErrorCode.RATE_LIMIT_EXCEEDED}
CUSTOMER = SERVICE | {ErrorCode.ACCOUNT_SUSPENDED, ErrorCode.CATALOG_UNAVAILABLE}

NOT_TOLD = frozenset({ErrorCode.NOT_FOUND, ErrorCode.ABANDONED, ErrorCode.CROSS_SITE, ErrorCode.CHANGED_MEANWHILE})
"""No inference answers these: nothing at the address, what the audit writes where nobody was left to be answered, and what
the actions of the page for on-call are refused with.
"""

ASKED = frozenset(ErrorCode) - NOT_TOLD

NOT_EMPTY: Schema = {"type": "string", "minLength": 1}
IDEMPOTENCY_KEY = Parameter(
    name=HEADER,
    place="header",
    sentence="Names this request: the same body again is answered from the first one, for as long as that is kept, "
    "usually 24 hours.",
    schema={
        "type": "string",
        "pattern": r'^("([!#-\[\]-~]|\\["\\])+"|[!#-~][!-~]*)$',
        "minLength": 1,
        "maxLength": MAX_CHARACTERS,
    },
)
IF_NONE_MATCH = Parameter(name="If-None-Match", place="header", sentence="The ETag of a page that the client has.")
TRACEPARENT = Parameter(
    name="traceparent", place="header", sentence="W3C trace context; the trace id is kept in the audit."
)
MODEL_ID = Parameter(name="id", place="path", sentence="The model's name, which may hold slashes.", schema=NOT_EMPTY)
REQUEST_ID = Parameter(name="id", place="path", sentence="A request's id, as `x-request-id` told it.", schema=NOT_EMPTY)


def asks(
    path: str,
    body: type,
    answer: Any,
    summary: str,
    *,
    example: Mapping[str, Any],
    rules: Mapping[str, Schema] = {},
    conditions: tuple[Schema, ...] = (),
    events: Any = None,
    parameters: tuple[Parameter, ...] = (),
    also: Mapping[int, EndpointTexts] = {},
) -> ApiEndpoint:
    """A door for inference. `events`: the type of an event, where it can stream; `also`: its answers beside the 200."""
    content = in_json(answer) if events is None else in_json(answer) | {EVENT_STREAM: events}
    completed = EndpointTexts(
        sentence="Completed.",
        content=content,
        headers=("x-request-id", *LIMITS) if events else ("x-request-id", "Server-Timing", *LIMITS),
        sometimes=(*TOKEN_LIMITS, "Idempotent-Replayed", "Cache-Status", *(OF_EITHER if events else ())),
    )
    return ApiEndpoint(
        path=path,
        methods=("POST",),
        tag="inference",
        summary=summary,
        wants="key",
        body=body,
        example=example,
        rules=rules,
        conditions=conditions,
        parameters=(IDEMPOTENCY_KEY, TRACEPARENT, *parameters),
        answers={200: completed, **also},
        errors=ASKED,
    )


def looks(
    path: str, summary: str, kind: Any, *more: ErrorCode, headers: tuple[str, ...] = (), **changes: Any
) -> ApiEndpoint:
    """A door where a customer looks at something, which spends nothing."""
    says = EndpointTexts(
        sentence="Found.",
        content=in_json(kind),
        headers=("x-request-id", *headers, *LIMITS),
        sometimes=TOKEN_LIMITS,
    )
    errors = CUSTOMER | set(more)
    return ApiEndpoint(
        path=path,
        methods=READ,
        tag="account",
        summary=summary,
        wants="key",
        answers={200: says},
        errors=errors,
        **changes,
    )


def constant(path: str, summary: str, content: Mapping[str, Any]) -> ApiEndpoint:
    """A page that is the same for everybody."""
    headers = ("x-request-id", "ETag", *(name for name, _ in page_headers(*content)))
    answers = {
        200: EndpointTexts(sentence="The page.", content=content, headers=headers),
        304: EndpointTexts(sentence="It is what If-None-Match names.", headers=headers),
    }
    return ApiEndpoint(
        path=path,
        methods=READ,
        tag="pages",
        summary=summary,
        parameters=(IF_NONE_MATCH,),
        answers=answers,
        errors=ANYWHERE,
    )


def probe(path: str, summary: str, answers: Mapping[int, Any]) -> ApiEndpoint:
    """A page for load balancers."""
    told = {
        status: EndpointTexts(sentence=sentence, content=in_json(kind), headers=("x-request-id",))
        for status, (sentence, kind) in answers.items()
    }
    return ApiEndpoint(path=path, methods=READ, tag="operations", summary=summary, answers=told, errors=ANYWHERE)


def inside(path: str, summary: str, answers: Mapping[int, Any], *more: ErrorCode, **changes: Any) -> ApiEndpoint:
    """A page for operators, behind the service token."""
    told = {
        status: EndpointTexts(sentence=sentence, content=in_json(kind), headers=("x-request-id", "Cache-Control"))
        for status, (sentence, kind) in answers.items()
    }
    return ApiEndpoint(
        path=path,
        methods=("GET",),
        tag="operations",
        summary=summary,
        wants="service",
        answers=told,
        errors=SERVICE | set(more),
        **changes,
    )


SOMETIMES = "-if-known"
"""The end of a component's name where the header is not always there: a reference cannot say so by itself."""

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_GO_DURATION: Schema = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+(\.\d+)?(ms|s))$"}

_HEADERS: dict[str, tuple[str, Schema, Any]] = {
    "x-request-id": (
        "The request's id: what support asks for, and what the audit row is called.",
        {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
        "req_01a1fcc578457330952e380ef16929eb",
    ),
    "RateLimit-Policy": (
        "Each limit in force now (IETF draft 11): its name, its quota `q`, its window `w` in seconds.",
        _TEXT,
        '"requests";q=200;w=1, "concurrency";q=20;qu="concurrent-requests"',
    ),
    "RateLimit": (
        "What is left of each limit (IETF draft 11): `r` units, and `t` seconds until it is full again.",
        _TEXT,
        '"requests";r=199;t=1, "concurrency";r=19',
    ),
    "x-ratelimit-limit-requests": ("The burst of requests, as OpenAI's clients read it.", _COUNT, 200),
    "x-ratelimit-remaining-requests": ("How many of them are left.", _COUNT, 199),
    "x-ratelimit-reset-requests": ("Until all are back: a duration as Go writes it.", _GO_DURATION, "5ms"),
    "x-ratelimit-limit-tokens": ("Tokens a minute, where they have a limit.", _COUNT, 100_000),
    "x-ratelimit-remaining-tokens": ("How many of them are left.", _COUNT, 99_936),
    "x-ratelimit-reset-tokens": ("Until all are back: a duration as Go writes it.", _GO_DURATION, "38ms"),
    "Retry-After": ("When to try again, in seconds, by the measured drain rate, with jitter.", _COUNT, 2),
    "retry-after-ms": ("The same in milliseconds.", _COUNT, 1125),
    "x-should-retry": (
        "Sent where a client's own rule for the status would be wrong.",
        {"type": "string", "enum": ["true", "false"]},
        "false",
    ),
    "Server-Timing": (
        "Where the time went, in milliseconds: waiting in the tier's queue, on the way in a batch, on the GPU.",
        _TEXT,
        "queue;dur=1.0, batch;dur=5.7, gpu;dur=162.5",
    ),
    "Idempotent-Replayed": (
        "The answer is the stored one of the first request with this Idempotency-Key.",
        {"type": "string", "enum": ["true"]},
        "true",
    ),
    "Cache-Status": (
        "The answer was there already (RFC 9211), or is that of an equal request's run.",
        {"type": "string", "enum": ["tierlane; hit", "tierlane; fwd=miss; collapsed"]},
        "tierlane; hit",
    ),
    "WWW-Authenticate": ("How to authenticate.", {"type": "string", "enum": ["Bearer"]}, "Bearer"),
    "Location": ("Where the result of the job will be.", _TEXT, "/v1/result/req_01a1fcc578457330952e380ef16929eb"),
    "Preference-Applied": (
        "The preference that was heard.",
        {"type": "string", "enum": ["respond-async"]},
        "respond-async",
    ),
    "Allow": ("The methods that this address takes.", _TEXT, "GET, HEAD"),
    "Cache-Control": ("Whether the answer may be kept.", _TEXT, "no-store"),
    "Set-Cookie": (
        "The session of the page for on-call, for browsers.",
        _TEXT,
        "tierlane_session=...; Path=/internal/dashboard; Max-Age=43200; HttpOnly; SameSite=Strict",
    ),
    "ETag": (
        "Names this version of the page; sent back in If-None-Match it saves the body.",
        _TEXT,
        '"9a0364b9e99bb480"',
    ),
    "Content-Security-Policy": (
        "The page may load nothing from anywhere, and be framed by nobody.",
        _TEXT,
        "default-src 'none'; frame-ancestors 'none'",
    ),
    "X-Content-Type-Options": ("The content type is what it says.", {"type": "string", "enum": ["nosniff"]}, "nosniff"),
    "Referrer-Policy": (
        "Whoever is linked to is not told from where.",
        {"type": "string", "enum": ["no-referrer"]},
        "no-referrer",
    ),
}


HEADER_NAMES = tuple(_HEADERS)


def header_component(name: str) -> Schema:
    """The header object of a component's name. Raises KeyError for a header that is not in the table."""
    sentence, schema, example = _HEADERS[name.removesuffix(SOMETIMES)]
    required = not name.endswith(SOMETIMES)
    return {"description": sentence, "required": required, "schema": schema, "example": example}
