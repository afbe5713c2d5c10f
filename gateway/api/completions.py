"""`POST /v1/completions` in OpenAI's format (https://platform.openai.com/docs/api-reference/completions).

A list of prompts is one request per prompt; all of them are admitted or none.
"""

import msgspec

from gateway.api.format import InferenceRequest, InferenceResult, TokenUsage, usage
from gateway.api.inference import ApiFormat, Integer, check_model, completed
from gateway.api.openai_common import ACCEPTED_VALUES, SamplingFields, check_values, includes_usage, parameters_of
from gateway.api.stream_chunks import completion_chunks
from gateway.http.request import check_duplicates, decode, texts_of
from gateway.http.response import HttpResponse, encode_json
from gateway.http.validation import invalid
from scheduler.request_id import created_ms

Tokens = list[Integer]


class CompletionBody(SamplingFields, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The request body."""

    prompt: str | list[str | Integer | Tokens]
    best_of: Integer | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Integer | None = None


class Choice(msgspec.Struct, gc=False):
    """The text, and the reason of its end: `stop` or `length`."""

    text: str
    index: int
    logprobs: None
    finish_reason: str


class Completion(msgspec.Struct, gc=False):
    """The response body. `created` is Unix time in seconds, from the request id."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: TokenUsage


_decoder = msgspec.json.Decoder(CompletionBody)
ACCEPTED = ACCEPTED_VALUES | {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None,),
}
NOT_TEXT = "`prompt` must be text, not token ids: each model has its own tokenizer."


def read_completion(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """Raises RequestError that names the field."""
    body = decode(_decoder, raw)
    check_duplicates(raw)
    check_model("model", body.model)
    check_values(body, ACCEPTED)
    first, *more = texts_of("prompt", body.prompt, max_input_bytes, NOT_TEXT)
    if more and body.stream:
        raise invalid("stream", "`stream` supports one prompt: send one request per prompt.")
    return InferenceRequest(
        first,
        body.model,
        parameters_of(body),
        more=tuple(more),
        service_tier=body.service_tier,
        stream=bool(body.stream),
        include_usage=includes_usage(body),
    )


def write_completion(result: InferenceResult) -> HttpResponse:
    """Write the response to completed requests: one choice per prompt."""
    first = result.replies[0]
    document = Completion(
        id=first.id,
        object="text_completion",
        created=created_ms(first.id) // 1000,
        model=result.model,
        choices=[Choice(reply.output, i, None, reply.finish_reason) for i, reply in enumerate(result.replies)],
        usage=usage(result.replies),
    )
    return completed(first, encode_json(document), result.latency_ms, result.lines)


COMPLETIONS = ApiFormat(
    read_completion, write_completion, "prompt", flat=True, chunks=completion_chunks, endpoint="/v1/completions"
)
