"""`POST /v1/completions` in OpenAI's format (https://platform.openai.com/docs/api-reference/completions).

A list of prompts is one request per prompt; all of them are admitted or none. A body that needs a capability, or has fields
of model servers, has a document form for each prompt, for a model that passes requests on (scheduler/chat_document.py).
A prompt of token ids is passed on too, since only the model's server knows its tokenizer.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.format import DocumentForm, InferenceRequest, InferenceResult, TokenUsage, usage
from gateway.api.inference import ApiFormat, Integer, check_model, completed
from gateway.api.passed_on_members import check_repeated, decode_extended, members_of, needs_of, passed_on_members
from gateway.api.sampling_fields import (
    NO_EFFECT,
    OF_SERVERS,
    SAMPLING_NEEDS,
    Count,
    SamplingFields,
    includes_usage,
    parameters_of,
)
from gateway.api.stream_chunks import completion_chunks
from gateway.http.body.strict_json import check_duplicates
from gateway.http.body.text_fields import texts_of
from gateway.http.response import HttpResponse, encode_json
from gateway.http.validation import invalid
from scheduler.capabilities import ENDPOINT, Capability
from scheduler.chat_events import joined
from scheduler.payload import Task
from scheduler.request_id import created_ms

Tokens = list[Integer]

_NO_EFFECT: dict[str, tuple[Any, ...]] = NO_EFFECT | {"best_of": (1,), "echo": (False,), "suffix": ("",)}
NEEDS = SAMPLING_NEEDS | {
    "best_of": Capability.CHOICES,
    "logprobs": Capability.LOGPROBS,
    "echo": ENDPOINT,
    "suffix": ENDPOINT,
}
MIXED = "`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists, none of them empty."


class CompletionBody(SamplingFields, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The request body."""

    prompt: str | list[str | Integer | Tokens]
    best_of: Count | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Integer | None = None


class _AnyCompletionBody(CompletionBody, forbid_unknown_fields=False, frozen=True, kw_only=True):
    """The body with fields that only some servers know."""


class Choice(msgspec.Struct, gc=False):
    """The text, and the reason of its end: `stop`, `length` or another one of the model's server."""

    text: str
    index: int
    logprobs: dict[str, Any] | None
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
_extended: msgspec.json.Decoder[CompletionBody] = msgspec.json.Decoder(_AnyCompletionBody)
_FIELDS = frozenset(CompletionBody.__struct_fields__)


def read_completion(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """Raises RequestError that names the field."""
    body = decode_extended(_decoder, _extended, raw)
    check_duplicates(raw)
    check_model("model", body.model)
    is_text, prompts = _prompts(body.prompt, max_input_bytes)
    if len(prompts) > 1 and body.stream:
        raise invalid("stream", "`stream` supports one prompt: send one request per prompt.")
    return InferenceRequest(
        prompts[0],
        body.model,
        parameters_of(body),
        more=tuple(prompts[1:]),
        service_tier=body.service_tier,
        stream=bool(body.stream),
        include_usage=includes_usage(body),
        document=_document_form(body, raw, prompts, max_input_bytes, is_text=is_text),
    )


def _prompts(value: str | list[str | int | list[int]], max_input_bytes: int) -> tuple[bool, list[str]]:
    """Whether the prompts are texts, and the texts; else the JSON of each list of token ids. Raises RequestError."""
    if isinstance(value, str) or all(isinstance(each, str) for each in value):
        return True, texts_of("prompt", value, max_input_bytes, MIXED)
    lists = [value] if all(isinstance(each, int) for each in value) else value
    if not all(isinstance(each, list) and each for each in lists):
        raise invalid("prompt", MIXED)
    return False, texts_of("prompt", [encode_json(each).decode() for each in lists], max_input_bytes, MIXED)


def _document_form(
    body: CompletionBody, raw: bytes, prompts: Sequence[str], max_input_bytes: int, *, is_text: bool
) -> DocumentForm | None:
    """A body for each prompt; None if the plain form has all that it asks for."""
    may_be_unknown = members_of(raw) if isinstance(body, _AnyCompletionBody) else {}
    needs = needs_of(body, may_be_unknown, _FIELDS, NEEDS, _NO_EFFECT)
    if not is_text:
        needs.setdefault(ENDPOINT, "prompt")
    if not needs and all(getattr(body, name) is None for name in OF_SERVERS):
        return None
    members = passed_on_members(members_of(raw), _FIELDS)
    others = len(encode_json({**members, "prompt": ""}))
    check_repeated("prompt", len(prompts), others, max_input_bytes)
    written = (encode_json(prompt) if is_text else prompt.encode() for prompt in prompts)
    first, *more = (encode_json({**members, "prompt": msgspec.Raw(prompt)}).decode() for prompt in written)
    return DocumentForm(
        first,
        needs,
        tokens=-(others // 4),  # They are no text.
        choices=max(body.n or 1, body.best_of or 1),
        task=Task.COMPLETION_DOCUMENT,
        more=tuple(more),
        fields=_FIELDS,
    )


def write_completion(result: InferenceResult) -> HttpResponse:
    """Write the response to completed requests: one choice per prompt, or as many as the model's server made of each."""
    first = result.replies[0]
    document: Any = Completion(
        id=first.id,
        object="text_completion",
        created=created_ms(first.id) // 1000,
        model=result.model,
        choices=[Choice(reply.output, i, None, reply.finish_reason) for i, reply in enumerate(result.replies)],
        usage=usage(result.replies),
    )
    if result.passed_on:
        document = _passed_on(result, msgspec.structs.asdict(document))
    return completed(first, encode_json(document), result.latency_ms, result.lines)


def _passed_on(result: InferenceResult, document: dict[str, Any]) -> dict[str, Any]:
    """The responses of a model's server as one, with the gateway's id and model, and tokens even if it counted none."""
    responses = [joined(reply.output) for reply in result.replies]
    choices = [choice for response in responses for choice in response["choices"]]
    if len(responses) == 1:  # The usage of several has no details.
        document |= {name: value for name, value in responses[0].items() if value is not None}
    return document | {"choices": [{**choice, "index": index} for index, choice in enumerate(choices)]}


COMPLETIONS = ApiFormat(
    read_completion, write_completion, "prompt", flat=True, chunks=completion_chunks, endpoint="/v1/completions"
)
