"""What every address of a gateway takes and says: one `Door` for each route of `build_routes` (gateway/wiring.py).

A door for inference is made by `asks`, whatever its form: they are one request behind, with the same errors.
tests/architecture/test_openapi.py compares this table with the routes, both ways.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.account import Account
from gateway.action_doors import ACTION_DOORS
from gateway.api import chat, completions
from gateway.api.chat import MAX_MESSAGES, ChatBody, ChatCompletion, ChatMessage
from gateway.api.completions import Completion, CompletionBody
from gateway.api.embeddings import EmbeddingBody, Embeddings
from gateway.api.inference import InferenceBody
from gateway.api.models import ModelEntry, ModelList
from gateway.api.stream_chunks import ChatChunk, CompletionChunk
from gateway.auth.service_tier import KNOWN
from gateway.autoscale import Scale
from gateway.dashboard_doors import DASHBOARD_DOORS
from gateway.http.response import JSON
from gateway.http.static import HTML
from gateway.jobs_document import JobResult, Promise
from gateway.metrics.exposition import CONTENT_TYPE as METRICS
from gateway.openapi.model import ANYWHERE, MODEL_ID, NOT_EMPTY, READ, REQUEST_ID, asks, constant, inside, looks, probe
from gateway.openapi_door import LIMITS, TOKEN_LIMITS, Door, Parameter, Says, Schema, only
from gateway.operations.health_model import Alive, HealthNow, Readiness
from gateway.predict import PlainAnswer, PlainBody, PredictBody, Prediction
from gateway.success import Success
from gateway.timeline import Story
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import MAX_SUBMISSIONS

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
PROMISED = Says(
    sentence="A job was taken; its result will be at `Location`.",
    content={JSON: Promise},
    headers=("x-request-id", "Location", "Preference-Applied", *LIMITS),
    sometimes=(*TOKEN_LIMITS, "Idempotent-Replayed"),
)
JOBS = (
    "With `Prefer: respond-async` the body may have `callback_url` besides: an http or https URL of an allowed host, to which "
    "the end of the job is POSTed with a signature of Standard Webhooks."
)


DOORS: tuple[Door, ...] = (
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
        {200: ("Found.", Story)},
        ErrorCode.NOT_FOUND,
        ErrorCode.CATALOG_UNAVAILABLE,
        parameters=(REQUEST_ID,),
    ),
    inside("/internal/autoscale", "How many workers each pool should have, and why", {200: ("The advice.", Scale)}),
    *DASHBOARD_DOORS,
    *ACTION_DOORS,
    probe("/livez", "Whether the process lives", {200: ("It does.", Alive)}),
    probe("/readyz", "Whether to send traffic here", {200: ("Yes.", Readiness), 503: ("Not now, and why.", Readiness)}),
    Door(
        path="/metrics",
        methods=READ,
        tag="operations",
        summary="What Prometheus reads",
        answers={200: Says(sentence="All figures.", content={METRICS: str}, headers=("x-request-id", "Cache-Control"))},
        errors=ANYWHERE,
    ),
    constant("/", "What this is, and how to begin", {HTML: str}),
    constant("/docs", "This description, to be read", {HTML: str}),
    constant("/openapi.json", "This description", {JSON: dict[str, Any]}),
)
