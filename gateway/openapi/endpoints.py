"""What every endpoint of a gateway takes and returns: one `ApiEndpoint` for each route of `build_routes` (gateway/wiring.py).

Inference in any API format is made by `asks`: behind it is one request, with the same errors.
tests/architecture/test_openapi.py compares this table with the routes, both ways.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.api import chat, completions
from gateway.api.account import Account
from gateway.api.chat import MAX_MESSAGES, ChatBody, ChatCompletion, ChatMessage
from gateway.api.completions import Completion, CompletionBody
from gateway.api.embeddings import EmbeddingBody, Embeddings
from gateway.api.inference import InferenceBody, PlainAnswer, PlainBody, PredictBody, Prediction, Success
from gateway.api.models import ModelEntry, ModelList
from gateway.api.stream_chunks import ChatChunk, CompletionChunk
from gateway.auth.service_tier import KNOWN
from gateway.autoscale import Scale
from gateway.http.response import JSON
from gateway.http.sse import EVENTS
from gateway.http.static import HTML
from gateway.jobs.results import JobResult, Promise
from gateway.metrics.endpoint import CONTENT_TYPE as METRICS
from gateway.openapi.model import (
    ANYWHERE,
    LIMITS,
    MODEL_ID,
    NOT_EMPTY,
    READ,
    REQUEST_ID,
    SERVICE,
    TOKEN_LIMITS,
    ApiEndpoint,
    EndpointTexts,
    Parameter,
    Schema,
    asks,
    constant,
    in_json,
    inside,
    looks,
    only,
    probe,
)
from gateway.operations.action_requests import (
    CordonBody,
    Cordoned,
    PurgeBody,
    Purged,
    RequeueBody,
    Requeued,
    UncordonBody,
)
from gateway.operations.dashboard import ASSETS, CSS, ICON, SCRIPT, Session, html_headers
from gateway.operations.endpoints import RequestTimeline
from gateway.operations.health_model import HealthNow, Liveness, Readiness
from gateway.operations.state import DashboardState
from ledger.dead_letters import LetterGroups
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import MAX_SUBMISSIONS

PAGE_HEADERS = ("x-request-id", *(name for name, _ in html_headers()))
SESSION = EndpointTexts(
    sentence="The browser has it, or has it no more.",
    content=in_json(Session),
    headers=("x-request-id", "Cache-Control", "Set-Cookie"),
)
WATCHED = (
    "With `Accept: text/event-stream`: first an event `history` with the last quarter of an hour, then `state` every second, or "
    "sooner where a worker is lost. Without it: one document of state. A browser sends its cookie instead of the token."
)
ASSET = Parameter(name="id", place="path", sentence="Its name.", schema=only(*ASSETS))
_FILE = constant("/internal/dashboard/assets/{id}", "A file of the page", {SCRIPT: str})

DASHBOARD_DOORS: tuple[ApiEndpoint, ...] = (
    ApiEndpoint(
        path="/internal/dashboard",
        methods=("GET",),
        tag="operations",
        summary="The page for on-call",
        wants="service",
        answers={
            200: EndpointTexts(sentence="The page.", content={HTML: str}, headers=PAGE_HEADERS),
            401: EndpointTexts(sentence="The page where a browser logs in.", content={HTML: str}, headers=PAGE_HEADERS),
        },
        errors=SERVICE,
    ),
    ApiEndpoint(
        path="/internal/dashboard/session",
        methods=("POST", "DELETE"),
        tag="operations",
        summary="Log a browser in with the service token, and out",
        wants="service",
        answers={200: SESSION},
        errors=SERVICE,
    ),
    replace(
        inside("/internal/dashboard/events", "What the page shows, live", {200: ("The latest.", DashboardState)}),
        text=WATCHED,
        answers={
            200: EndpointTexts(
                sentence="The latest, or the stream.",
                content={JSON: DashboardState, EVENTS: DashboardState},
                headers=("x-request-id", "Cache-Control"),
            )
        },
    ),
    replace(
        _FILE,
        tag="operations",
        parameters=(*_FILE.parameters, ASSET),
        answers={**_FILE.answers, 200: replace(_FILE.answers[200], content={SCRIPT: str, CSS: str, ICON: str})},
        errors=_FILE.errors | {ErrorCode.NOT_FOUND},
    ),
)


WORKERS = "/internal/dashboard/workers"
LETTERS = "/internal/dashboard/dead-letters"
REFUSED = (
    ErrorCode.CROSS_SITE,
    ErrorCode.CATALOG_UNAVAILABLE,
    ErrorCode.REQUEST_TOO_LARGE,
    ErrorCode.UNSUPPORTED_ENCODING,
)
CONFIRMED = (
    "It carries what was confirmed, and is refused where that is not so any more. A browser sends its cookie, and must say by "
    "`Sec-Fetch-Site` or `Origin` that the page itself asks. A row of `config_changes` tells of it."
)
LETTER: Mapping[str, Any] = {"up_to": 41, "tier": "paid", "model": "tiny", "error_code": "worker_lost"}


def _acts(
    path: str, summary: str, body: type, says: tuple[str, Any], example: Mapping[str, Any], *more: ErrorCode
) -> ApiEndpoint:
    return replace(
        inside(path, summary, {200: says}, *REFUSED, *more),
        methods=("POST",),
        body=body,
        example=example,
        text=CONFIRMED,
    )


ACTION_DOORS: tuple[ApiEndpoint, ...] = (
    _acts(
        f"{WORKERS}/cordon",
        "No new work for a worker",
        CordonBody,
        ("It is cordoned.", Cordoned),
        {"worker": "worker-1", "healthy_left": 3, "reason": "its fan is loud"},
        ErrorCode.NOT_FOUND,
        ErrorCode.CHANGED_MEANWHILE,
    ),
    _acts(
        f"{WORKERS}/uncordon",
        "A worker may have work again",
        UncordonBody,
        ("It is not cordoned.", Cordoned),
        {"worker": "worker-1"},
        ErrorCode.NOT_FOUND,
    ),
    inside(
        LETTERS,
        "How many dead letters there are, by tier, model and cause",
        {200: ("Counted.", LetterGroups)},
        ErrorCode.CATALOG_UNAVAILABLE,
    ),
    _acts(
        f"{LETTERS}/requeue",
        "Run dead letters again: the oldest 32 of those that were confirmed",
        RequeueBody,
        ("How each ended.", Requeued),
        {"count": 2, "after": 0, **LETTER},
        ErrorCode.CHANGED_MEANWHILE,
    ),
    _acts(
        f"{LETTERS}/purge",
        "Delete dead letters for good",
        PurgeBody,
        ("They are gone.", Purged),
        {"count": 2, **LETTER},
        ErrorCode.CHANGED_MEANWHILE,
    ),
)


TEXTS: Schema = {
    "anyOf": [NOT_EMPTY, {"type": "array", "items": NOT_EMPTY, "minItems": 1, "maxItems": MAX_SUBMISSIONS}]
}
SERVICE_TIER = only(None, *KNOWN)
MESSAGES: Schema = {
    "type": "array",
    "items": {"$ref": f"#/components/schemas/{ChatMessage.__name__}"},
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
}
ONE_NAME: Schema = {
    "not": {
        "properties": {"max_tokens": {"type": "integer"}, "max_completion_tokens": {"type": "integer"}},
        "required": ["max_tokens", "max_completion_tokens"],
    }
}
"""`max_tokens` and its newer name are not both there."""


def taken(values: Mapping[str, tuple[Any, ...]]) -> dict[str, Schema]:
    """The rules of fields that may be there as long as they change nothing."""
    return {name: only(*each) for name, each in values.items()}


STREAMED: Schema = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
OPTIONS_OF_A_STREAM: Schema = {"anyOf": [{"properties": {"stream_options": {"type": "null"}}}, STREAMED]}
ONE_PROMPT: Schema = {"not": {"allOf": [STREAMED, {"properties": {"prompt": {"type": "array", "minItems": 2}}}]}}
"""Of a stream."""

PREFER = Parameter(
    name="Prefer", place="header", sentence="`respond-async`: a job instead of an answer. Anything else is passed over."
)
TASK_ID = Parameter(name="id", place="path", sentence="A job's id, as `task_id` told it.", schema=NOT_EMPTY)
PROMISED = EndpointTexts(
    sentence="A job was taken; its result will be at `Location`.",
    content={JSON: Promise},
    headers=("x-request-id", "Location", "Preference-Applied", *LIMITS),
    sometimes=(*TOKEN_LIMITS, "Idempotent-Replayed"),
)
JOBS = (
    "With `Prefer: respond-async` the body may have `callback_url` besides: an http or https URL of an allowed host, to which "
    "the end of the job is POSTed with a signature of Standard Webhooks."
)


DOORS: tuple[ApiEndpoint, ...] = (
    replace(
        asks(
            "/v1/inference",
            InferenceBody,
            Success,
            "Ask a model",
            example={"input": "Once upon a time", "parameters": {"max_tokens": 16}},
            rules={"service_tier": SERVICE_TIER},
            parameters=(PREFER,),
            also={202: PROMISED},
        ),
        text=JOBS,
    ),
    replace(
        looks(
            "/v1/result/{id}",
            "How a job stands, and its result; DELETE cancels it",
            JobResult,
            ErrorCode.NOT_FOUND,
            parameters=(TASK_ID,),
            headers=("Cache-Control",),
        ),
        methods=("GET", "HEAD", "DELETE"),
    ),
    asks(
        "/v1/predict",
        PredictBody,
        Prediction,
        "The same under other names",
        example={"model_id": "tiny", "input_data": "Once upon a time"},
    ),
    asks(
        "/api/inference",
        PlainBody,
        PlainAnswer,
        "The same for the default model",
        example={"input": "Once upon a time"},
    ),
    asks(
        "/v1/completions",
        CompletionBody,
        Completion,
        "Complete prompts, as OpenAI's clients ask for it",
        example={"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16},
        rules={"prompt": TEXTS, "service_tier": SERVICE_TIER, **taken(completions.TAKEN)},
        conditions=(OPTIONS_OF_A_STREAM, ONE_PROMPT),
        events=CompletionChunk,
    ),
    asks(
        "/v1/chat/completions",
        ChatBody,
        ChatCompletion,
        "Go on with a conversation, as OpenAI's clients ask for it",
        example={"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}], "max_completion_tokens": 16},
        rules={"messages": MESSAGES, "service_tier": SERVICE_TIER, **taken(chat.TAKEN)},
        conditions=(ONE_NAME, OPTIONS_OF_A_STREAM),
        events=ChatChunk,
    ),
    asks(
        "/v1/embeddings",
        EmbeddingBody,
        Embeddings,
        "Turn texts into vectors, as OpenAI's clients ask for it",
        example={"model": "tiny", "input": "Once upon a time"},
        rules={"input": TEXTS, "service_tier": SERVICE_TIER, "dimensions": only(None)},
    ),
    looks("/v1/models", "The models that can be named", ModelList),
    looks("/v1/models/{id...}", "One model", ModelEntry, ErrorCode.MODEL_NOT_FOUND, parameters=(MODEL_ID,)),
    looks("/v1/me", "Limits as they are now, what is left, the last 24 hours", Account, headers=("Cache-Control",)),
    inside(
        "/internal/health",
        "How the whole is, in figures and sentences",
        {200: ("Healthy or degraded: requests are served.", HealthNow), 503: ("Down: they are not.", HealthNow)},
    ),
    inside(
        "/internal/requests/{id}",
        "What became of one request",
        {200: ("Found.", RequestTimeline)},
        ErrorCode.NOT_FOUND,
        ErrorCode.CATALOG_UNAVAILABLE,
        parameters=(REQUEST_ID,),
    ),
    inside("/internal/autoscale", "How many workers each pool should have, and why", {200: ("The advice.", Scale)}),
    *DASHBOARD_DOORS,
    *ACTION_DOORS,
    probe("/livez", "Whether the process lives", {200: ("It does.", Liveness)}),
    probe("/readyz", "Whether to send traffic here", {200: ("Yes.", Readiness), 503: ("Not now, and why.", Readiness)}),
    ApiEndpoint(
        path="/metrics",
        methods=READ,
        tag="operations",
        summary="What Prometheus reads",
        answers={
            200: EndpointTexts(
                sentence="All figures.", content={METRICS: str}, headers=("x-request-id", "Cache-Control")
            )
        },
        errors=ANYWHERE,
    ),
    constant("/", "What this is, and how to begin", {HTML: str}),
    constant("/docs", "This description, to be read", {HTML: str}),
    constant("/openapi.json", "This description", {JSON: dict[str, Any]}),
)
