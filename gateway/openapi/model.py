"""The kinds of addresses that there are, so that the description of one more is a line or two (gateway/openapi/endpoints.py)."""

from collections.abc import Mapping
from typing import Any

from gateway.http.static import page_headers
from gateway.idempotency import HEADER, MAX_CHARACTERS
from gateway.openapi_door import LIMITS, TOKEN_LIMITS, Door, Parameter, Says, Schema, in_json
from scheduler.errors import ErrorCode

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
    also: Mapping[int, Says] = {},
) -> Door:
    """A door for inference. `events`: the type of an event, where it can stream; `also`: its answers beside the 200."""
    content = in_json(answer) if events is None else in_json(answer) | {EVENT_STREAM: events}
    completed = Says(
        sentence="Completed.",
        content=content,
        headers=("x-request-id", *LIMITS) if events else ("x-request-id", "Server-Timing", *LIMITS),
        sometimes=(*TOKEN_LIMITS, "Idempotent-Replayed", "Cache-Status", *(OF_EITHER if events else ())),
    )
    return Door(
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


def looks(path: str, summary: str, kind: Any, *more: ErrorCode, headers: tuple[str, ...] = (), **changes: Any) -> Door:
    """A door where a customer looks at something, which spends nothing."""
    says = Says(
        sentence="Found.",
        content=in_json(kind),
        headers=("x-request-id", *headers, *LIMITS),
        sometimes=TOKEN_LIMITS,
    )
    errors = CUSTOMER | set(more)
    return Door(
        path=path,
        methods=READ,
        tag="account",
        summary=summary,
        wants="key",
        answers={200: says},
        errors=errors,
        **changes,
    )


def constant(path: str, summary: str, content: Mapping[str, Any]) -> Door:
    """A page that is the same for everybody."""
    headers = ("x-request-id", "ETag", *(name for name, _ in page_headers(*content)))
    answers = {
        200: Says(sentence="The page.", content=content, headers=headers),
        304: Says(sentence="It is what If-None-Match names.", headers=headers),
    }
    return Door(
        path=path,
        methods=READ,
        tag="pages",
        summary=summary,
        parameters=(IF_NONE_MATCH,),
        answers=answers,
        errors=ANYWHERE,
    )


def probe(path: str, summary: str, answers: Mapping[int, Any]) -> Door:
    """A page for load balancers."""
    told = {
        status: Says(sentence=sentence, content=in_json(kind), headers=("x-request-id",))
        for status, (sentence, kind) in answers.items()
    }
    return Door(path=path, methods=READ, tag="operations", summary=summary, answers=told, errors=ANYWHERE)


def inside(path: str, summary: str, answers: Mapping[int, Any], *more: ErrorCode, **changes: Any) -> Door:
    """A page for operators, behind the service token."""
    told = {
        status: Says(sentence=sentence, content=in_json(kind), headers=("x-request-id", "Cache-Control"))
        for status, (sentence, kind) in answers.items()
    }
    return Door(
        path=path,
        methods=("GET",),
        tag="operations",
        summary=summary,
        wants="service",
        answers=told,
        errors=SERVICE | set(more),
        **changes,
    )
