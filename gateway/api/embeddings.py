"""`POST /v1/embeddings` in OpenAI's form (https://platform.openai.com/docs/api-reference/embeddings): texts become vectors.

A list of texts is as many requests, admitted all or none.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from gateway.api.format import InferenceRequest, InferenceResult, usage
from gateway.api.inference import ApiFormat, Integer, check_model, completed
from gateway.http.request import check_duplicates, decode, invalid
from gateway.http.response import HttpResponse, encode_json
from gateway.inference.handler import texts_of
from scheduler.payload import Task, read_vector

NOT_TEXT = (
    "`input` must be text, not token ids: every model here has a tokenizer of its own. "
    "LangChain's OpenAIEmbeddings sends text with check_embedding_ctx_length=False."
)


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What OpenAI's clients send; None is the same as absent."""

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
    """The answer."""

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
        raise invalid("dimensions", "`dimensions` is not supported here: a model's vectors have the length they have.")
    first, *more = texts_of("input", body.input, max_input_bytes, NOT_TEXT)
    return InferenceRequest(
        first,
        body.model,
        task=Task.EMBED,
        more=tuple(more),
        service_tier=body.service_tier,
        floats=body.encoding_format != "base64",
    )


def write_embedding(served: InferenceResult) -> HttpResponse:
    """The answer for completed requests: a vector for each text."""
    spent = usage(served.replies)
    form: Callable[[str], str | list[float]] = read_vector if served.asked.floats else str
    document = Embeddings(
        object="list",
        data=[Embedding("embedding", index, form(reply.output)) for index, reply in enumerate(served.replies)],
        model=served.model,
        usage=EmbeddingUsage(spent.prompt_tokens, spent.total_tokens),
    )
    return completed(served.replies[0], encode_json(document), served.latency_ms, served.lines)


EMBEDDINGS = ApiFormat(read_embedding, write_embedding, flat=True, endpoint="/v1/embeddings")
