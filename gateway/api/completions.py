"""`POST /v1/completions` in OpenAI's form (https://platform.openai.com/docs/api-reference/completions): texts go on.

A list of prompts is as many requests, admitted all or none.
"""

from typing import Any

import msgspec

from gateway.api.format import InferenceRequest, InferenceResult, TokenUsage, usage
from gateway.api.inference import ApiFormat, Integer, check_model, completed
from gateway.api.openai_common import HARMLESS, SamplingFields, check_harmless, includes_usage, parameters_of
from gateway.api.stream_chunks import CompletionChunks
from gateway.http.request import check_duplicates, decode, invalid
from gateway.http.response import HttpResponse, encode_json
from gateway.inference.handler import texts_of
from scheduler.request_id import created_ms

Tokens = list[Integer]


class CompletionBody(SamplingFields, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What OpenAI's clients send."""

    prompt: str | list[str | Integer | Tokens]
    best_of: Integer | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Integer | None = None


class Choice(msgspec.Struct, gc=False):
    """The text, and why it ends there: `stop` or `length`."""

    text: str
    index: int
    logprobs: None
    finish_reason: str


class Completion(msgspec.Struct, gc=False):
    """The answer. `created` is in seconds of Unix time, as the request's id carries it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: TokenUsage


_decoder = msgspec.json.Decoder(CompletionBody)
TAKEN: dict[str, tuple[Any, ...]] = HARMLESS | {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None,),
}
NOT_TEXT = "`prompt` must be text, not token ids: every model here has a tokenizer of its own."


def read_completion(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """Raises RequestError that names the field."""
    body = decode(_decoder, raw)
    check_duplicates(raw)
    check_model("model", body.model)
    check_harmless(body, TAKEN)
    first, *more = texts_of("prompt", body.prompt, max_input_bytes, NOT_TEXT)
    if more and body.stream:
        raise invalid("stream", "`stream` takes one prompt: send a request for each.")
    return InferenceRequest(
        first,
        body.model,
        parameters_of(body),
        more=tuple(more),
        service_tier=body.service_tier,
        stream=bool(body.stream),
        include_usage=includes_usage(body),
    )


def write_completion(served: InferenceResult) -> HttpResponse:
    """The answer for completed requests: a choice for each prompt."""
    first = served.replies[0]
    document = Completion(
        id=first.id,
        object="text_completion",
        created=created_ms(first.id) // 1000,
        model=served.model,
        choices=[Choice(reply.output, i, None, reply.finish_reason) for i, reply in enumerate(served.replies)],
        usage=usage(served.replies),
    )
    return completed(first, encode_json(document), served.latency_ms, served.lines)


COMPLETIONS = ApiFormat(
    read_completion, write_completion, "prompt", flat=True, chunks=CompletionChunks, endpoint="/v1/completions"
)
