"""What every address of a gateway takes and says: one `Door` for each route of `build_routes` (gateway/parts.py).

A door for inference is described by `_asks`, whatever its form: they are one request behind, with the same errors. Anything
else is a `Door`. tests/architecture/test_openapi.py compares this table with the routes, both ways.
"""

from collections.abc import Mapping
from typing import Any

from gateway.account import Account
from gateway.answer import JSON
from gateway.completions import HARMLESS, Completion, CompletionBody
from gateway.health_document import Alive, Health, Readiness
from gateway.idempotency import HEADER, MAX_CHARACTERS
from gateway.inference_body import InferenceBody
from gateway.models import ModelEntry, ModelList
from gateway.openapi_door import LIMITS, TOKEN_LIMITS, Door, Parameter, Says, Schema, in_json, only
from gateway.page import HTML, page_headers
from gateway.predict import PlainAnswer, PlainBody, PredictBody, Prediction
from gateway.success import Success
from gateway.timeline import Story
from scheduler.errors import ErrorCode

E = ErrorCode
READ = ("GET", "HEAD")

ANYWHERE = frozenset({E.INVALID_REQUEST, E.METHOD_NOT_ALLOWED, E.REQUEST_TIMEOUT, E.NO_CAPACITY, E.INTERNAL_ERROR})
"""What the edge answers at any address: no HTTP, another method, too slow, too many connections, a fault of ours."""

SERVICE = ANYWHERE | {E.INVALID_API_KEY, E.RATE_LIMIT_EXCEEDED}
CUSTOMER = SERVICE | {E.ACCOUNT_SUSPENDED, E.CATALOG_UNAVAILABLE}

NOT_TOLD = frozenset({E.NOT_FOUND, E.ABANDONED})
"""No inference answers these: nothing at the address, and what the audit writes where nobody was left to be answered."""

ASKED = frozenset(ErrorCode) - NOT_TOLD

TAIL: Schema = {"type": "string", "minLength": 1}
IDEMPOTENCY_KEY = Parameter(
    name=HEADER,
    place="header",
    sentence="Names this request for 24 hours: the same body again is answered from the first one.",
    schema={
        "type": "string",
        "pattern": r'^("([!#-\[\]-~]|\\["\\])+"|[!#-~][!-~]*)$',
        "minLength": 1,
        "maxLength": MAX_CHARACTERS,
    },
)
TRACEPARENT = Parameter(
    name="traceparent", place="header", sentence="W3C trace context; the trace id is kept in the audit."
)
MODEL_ID = Parameter(name="id", place="path", sentence="The model's name, which may hold slashes.", schema=TAIL)
REQUEST_ID = Parameter(name="id", place="path", sentence="A request's id, as `x-request-id` told it.", schema=TAIL)


def _asks(
    path: str,
    body: type,
    answer: Any,
    summary: str,
    *,
    example: Mapping[str, Any],
    rules: Mapping[str, Schema] = {},
) -> Door:
    """A door for inference."""
    completed = Says(
        sentence="Completed.",
        content=in_json(answer),
        headers=("x-request-id", "Server-Timing", *LIMITS),
        sometimes=(*TOKEN_LIMITS, "Idempotent-Replayed"),
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
        parameters=(IDEMPOTENCY_KEY, TRACEPARENT),
        answers={200: completed},
        errors=ASKED,
    )


def _looks(path: str, summary: str, kind: Any, *more: ErrorCode, headers: tuple[str, ...] = (), **changes: Any) -> Door:
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


def _page(path: str, summary: str, content: Mapping[str, Any]) -> Door:
    """A page that is the same for everybody."""
    headers = ("x-request-id", "ETag", *(name for name, _ in page_headers(*content)))
    answers = {
        200: Says(sentence="The page.", content=content, headers=headers),
        304: Says(sentence="It is what If-None-Match names.", headers=headers),
    }
    return Door(path=path, methods=READ, tag="pages", summary=summary, answers=answers, errors=ANYWHERE)


def _probe(path: str, summary: str, answers: Mapping[int, Any]) -> Door:
    """A page for load balancers."""
    told = {
        status: Says(sentence=sentence, content=in_json(kind), headers=("x-request-id",))
        for status, (sentence, kind) in answers.items()
    }
    return Door(path=path, methods=READ, tag="operations", summary=summary, answers=told, errors=ANYWHERE)


def _inside(path: str, summary: str, answers: Mapping[int, Any], *more: ErrorCode, **changes: Any) -> Door:
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


_TEXT: Schema = {"type": "string", "minLength": 1}
ONE_PROMPT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 1}]}

DOORS: tuple[Door, ...] = (
    _asks(
        "/v1/inference",
        InferenceBody,
        Success,
        "Ask a model",
        example={"input": "Once upon a time", "parameters": {"max_tokens": 16}},
    ),
    _asks(
        "/v1/predict",
        PredictBody,
        Prediction,
        "The same under other names",
        example={"model_id": "tiny", "input_data": "Once upon a time"},
    ),
    _asks(
        "/api/inference",
        PlainBody,
        PlainAnswer,
        "The same for the default model",
        example={"input": "Once upon a time"},
    ),
    _asks(
        "/v1/completions",
        CompletionBody,
        Completion,
        "Complete one prompt, as OpenAI's clients ask for it",
        example={"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16},
        rules={"prompt": ONE_PROMPT, **{name: only(*values) for name, values in HARMLESS.items()}},
    ),
    _looks("/v1/models", "The models that can be named", ModelList),
    _looks("/v1/models/{id...}", "One model", ModelEntry, E.MODEL_NOT_FOUND, parameters=(MODEL_ID,)),
    _looks("/v1/me", "Limits as they are now, what is left, the last 24 hours", Account, headers=("Cache-Control",)),
    _inside(
        "/internal/health",
        "How the whole is, in figures and sentences",
        {200: ("Healthy or degraded: requests are served.", Health), 503: ("Down: they are not.", Health)},
    ),
    _inside(
        "/internal/requests/{id}",
        "What became of one request",
        {200: ("Found.", Story)},
        E.NOT_FOUND,
        E.CATALOG_UNAVAILABLE,
        parameters=(REQUEST_ID,),
    ),
    _probe("/livez", "Whether the process lives", {200: ("It does.", Alive)}),
    _probe(
        "/readyz", "Whether to send traffic here", {200: ("Yes.", Readiness), 503: ("Not now, and why.", Readiness)}
    ),
    _page("/", "What this is, and how to begin", {HTML: str}),
    _page("/docs", "This description, to be read", {HTML: str}),
    _page("/openapi.json", "This description", {JSON: dict[str, Any]}),
)
