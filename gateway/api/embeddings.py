"""`POST /v1/embeddings` in OpenAI's format (https://platform.openai.com/docs/api-reference/embeddings).

A list of texts is one request per text; all of them are admitted or none.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from gateway.api.format import InferenceRequest, InferenceResult, usage
from gateway.api.inference import ApiFormat, Integer, check_model, completed
from gateway.http.request import check_duplicates, decode, texts_of
from gateway.http.response import HttpResponse, encode_json
from gateway.http.validation import invalid
from scheduler.payload import Task, read_vector

NOT_TEXT = (
    "`input` must be text, not token ids: each model has its own tokenizer. "
    "LangChain's OpenAIEmbeddings sends text with check_embedding_ctx_length=False."
)


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The request body; null is the same as absent."""

    model: str
    input: str | list[str | Integer | list[Integer]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None
    service_tier: str | None = None
    user: str | None = None


class EmbeddingUsage(msgspec.Struct, gc=False):
    """Tokens of this call."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, gc=False):
    """One vector: a list of numbers, or base64 of little-endian float32."""

    object: str
    index: int
    embedding: str | list[float]


class Embeddings(msgspec.Struct, gc=False):
    """The response body."""

    object: str
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


_decoder = msgspec.json.Decoder(EmbeddingBody)


def read_embedding(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """Raises RequestError that names the field."""
    body = decode(_decoder, raw)
    check_duplicates(raw)
    check_model("model", body.model)
    if body.dimensions is not None:
        raise invalid("dimensions", "`dimensions` is not supported here: the length of vectors depends on the model.")
    first, *more = texts_of("input", body.input, max_input_bytes, NOT_TEXT)
    return InferenceRequest(
        first,
        body.model,
        task=Task.EMBED,
        more=tuple(more),
        service_tier=body.service_tier,
        floats=body.encoding_format != "base64",
    )


def write_embedding(result: InferenceResult) -> HttpResponse:
    """Write the response to completed requests: one vector per text."""
    tokens = usage(result.replies)
    decode_vector: Callable[[str], str | list[float]] = read_vector if result.request.floats else str
    document = Embeddings(
        object="list",
        data=[Embedding("embedding", index, decode_vector(reply.output)) for index, reply in enumerate(result.replies)],
        model=result.model,
        usage=EmbeddingUsage(tokens.prompt_tokens, tokens.total_tokens),
    )
    return completed(result.replies[0], encode_json(document), result.latency_ms, result.lines)


EMBEDDINGS = ApiFormat(read_embedding, write_embedding, flat=True, endpoint="/v1/embeddings")
