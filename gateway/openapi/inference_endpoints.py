"""The description of the inference endpoints in our own formats and in OpenAI's, and of the results of jobs."""

from gateway.api import chat
from gateway.api.chat import ChatBody, ChatCompletion
from gateway.api.completions import Completion, CompletionBody
from gateway.api.embeddings import EmbeddingBody, Embeddings
from gateway.api.inference import InferenceBody, PlainAnswer, PlainBody, PredictBody, Prediction, Success
from gateway.api.stream_chunks import ChatChunk, CompletionChunk
from gateway.http.response import JSON
from gateway.http.response_headers import Schema
from gateway.jobs.documents import JobResult, Promise
from gateway.openapi.endpoint_kinds import (
    LIMIT_HEADERS,
    SERVICE_TIER,
    TOKEN_LIMIT_HEADERS,
    account_endpoint,
    inference_endpoint,
)
from gateway.openapi.model import ApiEndpoint, Parameter, ResponseDescription
from gateway.openapi.schemas import NOT_EMPTY, only
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import MAX_SUBMISSIONS

TEXTS: Schema = {
    "anyOf": [NOT_EMPTY, {"type": "array", "items": NOT_EMPTY, "minItems": 1, "maxItems": MAX_SUBMISSIONS}]
}
ONE_TOKEN_LIMIT: Schema = {
    "not": {
        "properties": {"max_tokens": {"type": "integer"}, "max_completion_tokens": {"type": "integer"}},
        "required": ["max_tokens", "max_completion_tokens"],
    }
}
"""`max_tokens` and `max_completion_tokens` exclude each other."""

STREAMED: Schema = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
ONE_PROMPT: Schema = {"not": {"allOf": [STREAMED, {"properties": {"prompt": {"type": "array", "minItems": 2}}}]}}
"""A stream has one prompt."""

INFERENCE: tuple[ApiEndpoint, ...] = (
    inference_endpoint(
        "/v1/inference",
        InferenceBody,
        Success,
        "Run a model",
        example={"input": "Once upon a time", "parameters": {"max_tokens": 16}},
        rules=SERVICE_TIER,
        parameters=(Parameter("Prefer", "header", "`respond-async` starts a job. Other preferences are ignored."),),
        responses={
            202: ResponseDescription(
                description="The job was accepted. Its result will be at `Location`.",
                content={JSON: Promise},
                headers=("x-request-id", "Location", "Preference-Applied", "Retry-After", *LIMIT_HEADERS),
                optional_headers=(*TOKEN_LIMIT_HEADERS, "Idempotent-Replayed"),
            )
        },
        description=(
            "With `Prefer: respond-async` the body may contain `callback_url`: an http or https URL of an allowed host. When "
            "the job ends, its result is sent there by POST, signed according to Standard Webhooks. It may also contain "
            "`priority`: `background`, the default, or `interactive` in tiers that allow it."
        ),
    ),
    account_endpoint(
        "/v1/result/{id}",
        "State and result of a job; DELETE cancels it",
        JobResult,
        ErrorCode.NOT_FOUND,
        methods=("GET", "HEAD", "DELETE"),
        headers=("Cache-Control",),
        optional_headers=("Retry-After",),
        parameters=(Parameter("id", "path", "The id of a job, from `task_id`.", NOT_EMPTY),),
    ),
    inference_endpoint(
        "/v1/predict",
        PredictBody,
        Prediction,
        "Run a model, with other field names",
        example={"model_id": "tiny", "input_data": "Once upon a time"},
    ),
    inference_endpoint(
        "/api/inference", PlainBody, PlainAnswer, "Run the default model", example={"input": "Once upon a time"}
    ),
    inference_endpoint(
        "/v1/completions",
        CompletionBody,
        Completion,
        "Complete prompts (OpenAI format)",
        example={"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16},
        rules={"prompt": TEXTS} | SERVICE_TIER,
        conditions=(ONE_PROMPT,),
        events=CompletionChunk,
    ),
    inference_endpoint(
        "/v1/chat/completions",
        ChatBody,
        ChatCompletion,
        "Continue a conversation (OpenAI format)",
        example={"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}], "max_completion_tokens": 16},
        rules=SERVICE_TIER | {name: only(*each) for name, each in chat.ACCEPTED.items()},
        conditions=(ONE_TOKEN_LIMIT,),
        events=ChatChunk,
    ),
    inference_endpoint(
        "/v1/embeddings",
        EmbeddingBody,
        Embeddings,
        "Compute the vectors of texts (OpenAI format)",
        example={"model": "tiny", "input": "Once upon a time"},
        rules={"input": TEXTS} | SERVICE_TIER,
    ),
)
