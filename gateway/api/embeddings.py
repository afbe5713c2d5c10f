"""`POST /v1/embeddings` in OpenAI's format (https://platform.openai.com/docs/api-reference/embeddings).

A list of texts is one request per text; all of them are admitted or none. Fields that need a capability are parameters of
each, so that a server gets the texts of a list in one call.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from gateway.api.format import DocumentForm, InferenceRequest, InferenceResult, usage
from gateway.api.inference import ApiFormat, Integer, Parameters, Scalar, check_model, completed
from gateway.api.passed_on_members import check_repeated, decode_extended, members_of, needs_of, passed_on_members
from gateway.http.body.strict_json import check_duplicates
from gateway.http.body.text_fields import texts_of
from gateway.http.response import HttpResponse, encode_json
from gateway.http.validation import MAX_NAME_CHARACTERS, invalid
from scheduler.capabilities import Capability
from scheduler.payload import Task
from scheduler.vectors import read_vector

NOT_TEXT = (
    "`input` must be text, not token ids: each model has its own tokenizer. "
    "LangChain's OpenAIEmbeddings sends text with check_embedding_ctx_length=False."
)


MAX_DIMENSIONS = 65_536

_parameter = msgspec.json.Decoder(Scalar | list[Scalar])

NEEDS: dict[str, str] = {"dimensions": Capability.DIMENSIONS}
_NOT_PARAMETERS = frozenset({"input", "encoding_format"})


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The request body; null is the same as absent."""

    model: str
    input: str | list[str | Integer | list[Integer]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=MAX_DIMENSIONS)] | None = None
    service_tier: str | None = None
    user: str | None = None


class _AnyEmbeddingBody(EmbeddingBody, forbid_unknown_fields=False, frozen=True, kw_only=True):
    """The body with fields that only some servers know."""


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
_extended: msgspec.json.Decoder[EmbeddingBody] = msgspec.json.Decoder(_AnyEmbeddingBody)
_FIELDS = frozenset(EmbeddingBody.__struct_fields__)


def read_embedding(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """Raises RequestError that names the field."""
    body = decode_extended(_decoder, _extended, raw)
    check_duplicates(raw)
    check_model("model", body.model)
    texts = texts_of("input", body.input, max_input_bytes, NOT_TEXT)
    may_be_unknown = members_of(raw) if isinstance(body, _AnyEmbeddingBody) else {}
    needs = needs_of(body, may_be_unknown, _FIELDS, NEEDS, {})
    parameters: Parameters = {}
    if needs:
        parameters = _parameters(raw)
        check_repeated("input", len(texts), len(encode_json(parameters)), max_input_bytes)
    return InferenceRequest(
        texts[0],
        body.model,
        parameters,
        task=Task.EMBED,
        more=tuple(texts[1:]),
        service_tier=body.service_tier,
        floats=body.encoding_format != "base64",
        document=DocumentForm(texts[0], needs, task=Task.EMBED, fields=_FIELDS) if needs else None,
    )


def _parameters(raw: bytes) -> dict[str, Any]:
    """The members for the model's server. Raises RequestError for one that is neither a scalar nor a list of scalars."""
    parameters: dict[str, Any] = {}
    for name, value in passed_on_members(members_of(raw), _FIELDS).items():
        if name in _NOT_PARAMETERS:
            continue
        try:
            parameters[name] = _parameter.decode(value)
        except msgspec.ValidationError:
            shown = name[:MAX_NAME_CHARACTERS]
            raise invalid(
                shown, f"`{shown}` must be a text, a boolean, a number of 64 bits, or a list of them."
            ) from None
    return parameters


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
