"""The native API: `POST /v1/inference`, its older forms `/v1/predict` and `/api/inference`; the type of an API format.

Bodies are decoded and checked in one step, and errors name the field. Duplicate keys are detected by a count: a body has at
least one colon per key, so if the colons outside the decoded input are not more than the decoded keys, there is no
duplicate. Only bodies that fail this count are parsed a second time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceRequest, InferenceResult
from gateway.api.stream_chunks import MakeChunks
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.body.text_fields import check_text
from gateway.http.error_responses import ResponseForm
from gateway.http.response import HttpResponse, encode_json
from gateway.http.validation import MAX_NAME_CHARACTERS, invalid
from scheduler.errors import REFUSED, ErrorCode, RequestError
from scheduler.protocol.replies import Reply

# Backends use 64 bits. A larger number would be rejected late, or become a float.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Scalar = str | Integer | float | bool | None

MAX_PARAMETERS = 32
MAX_LIST_ITEMS = 32
MAX_MODEL_CHARACTERS = 128

# These limits are checked after decoding; here they are only part of the OpenAPI schema.
Text = Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1})]
_Scalars = Annotated[list[Scalar], msgspec.Meta(extra_json_schema={"maxItems": MAX_LIST_ITEMS})]
Parameters = Annotated[
    dict[str, Scalar | _Scalars],
    msgspec.Meta(
        extra_json_schema={"maxProperties": MAX_PARAMETERS, "propertyNames": {"maxLength": MAX_NAME_CHARACTERS}}
    ),
]

# RFC 9211: a cached result, or the run of an equal request.
_CACHE_STATUS = {
    "cache": "Cache-Status: tierlane; hit\r\n",
    "collapsed": "Cache-Status: tierlane; fwd=miss; collapsed\r\n",
}

_TIMING = "x-request-id: %s\r\nServer-Timing: queue;dur=%.1f, batch;dur=%.1f, gpu;dur=%.1f\r\n%s"


class InferenceBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The request body of `POST /v1/inference`."""

    input: Text
    model: str | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET
    service_tier: str | None = None


_decoder = msgspec.json.Decoder(InferenceBody)


def read_inference(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """Decode and check a body. Raises RequestError with `param`."""
    body = decode(_decoder, raw)
    check_text("input", body.input, max_input_bytes)
    check_model("model", body.model)
    keys = 1 + (body.model is not UNSET) + (body.service_tier is not None)
    parameters: Parameters = {}
    if body.parameters is not UNSET:
        parameters = body.parameters
        check_parameters(parameters)
        keys += 1 + len(parameters)
    # An escaped colon in the input is not a colon in `raw`, so bodies with escapes are parsed again.
    if b"\\u" in raw or raw.count(b":") - body.input.count(":") != keys:
        check_duplicates(raw)
    return InferenceRequest(body.input, body.model, parameters, service_tier=body.service_tier)


def check_parameters(parameters: Parameters) -> None:
    """Raises RequestError for too many parameters, or a name or list that is too long."""
    if len(parameters) > MAX_PARAMETERS:
        raise invalid("parameters", f"`parameters` must not have more than {MAX_PARAMETERS} members.")
    for name, value in parameters.items():
        if len(name) > MAX_NAME_CHARACTERS:
            raise invalid("parameters", f"A name in `parameters` is longer than {MAX_NAME_CHARACTERS} characters.")
        if isinstance(value, list) and len(value) > MAX_LIST_ITEMS:
            raise invalid(f"parameters.{name}", f"A list in `parameters` has more than {MAX_LIST_ITEMS} items.")


def check_model(param: str, name: str | UnsetType) -> None:
    """Raises RequestError `model_not_found` for a name that is too long."""
    if name is not UNSET and len(name) > MAX_MODEL_CHARACTERS:
        message = f"No model has a name of over {MAX_MODEL_CHARACTERS} characters: GET /v1/models lists the names."
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, message, param)


class Metadata(msgspec.Struct, gc=False):
    """Times in milliseconds, and details of the run."""

    tokens_used: int
    latency_ms: float
    queue_ms: float
    gpu_ms: float
    batch_size: int
    attempts: int
    model_version: str
    tier: str
    cached: bool = False


class Success(msgspec.Struct, gc=False):
    """The response body of `POST /v1/inference`."""

    request_id: str
    output: str
    metadata: Metadata


def write_inference(result: InferenceResult) -> HttpResponse:
    """Write the response to a completed request."""
    reply, latency_ms = result.replies[0], result.latency_ms
    metadata = Metadata(
        reply.tokens_used,
        hundredths(latency_ms),
        hundredths(reply.queue_ms),
        hundredths(reply.gpu_ms),
        reply.batch_size,
        reply.attempts,
        reply.model_version,
        result.tier,
        reply.served_from == "cache",
    )
    return completed(reply, encode_json(Success(reply.id, reply.output, metadata)), latency_ms, result.lines)


def hundredths(ms: float) -> float:
    """A time in ms with two digits; 0 for a negative one. A quarter of the cost of `round`."""
    return int(ms * 100 + 0.5) / 100 if ms > 0 else 0.0


def completed(reply: Reply, body: bytes, latency_ms: float, lines: str) -> HttpResponse:
    """A 200 with `body`, its request id, and `Server-Timing`."""
    queue_ms = reply.queue_ms if reply.queue_ms > 0 else 0.0
    gpu_ms = reply.gpu_ms if reply.gpu_ms > 0 else 0.0
    # The time outside the tier queue and the GPU: the transport of the batch and of the reply.
    batch_ms = latency_ms - queue_ms - gpu_ms
    response = HttpResponse(200, body)
    response.lines = _TIMING % (reply.id, queue_ms, batch_ms if batch_ms > 0 else 0.0, gpu_ms, lines)
    if reply.served_from:
        response.lines += _CACHE_STATUS.get(reply.served_from, "")
    return response


@dataclass(frozen=True, slots=True)
class ApiFormat:
    """The format of one endpoint.

    `read`: from a body and the maximum bytes of an input; raises RequestError. `write`: from the result to the response.
    `flat`: whether parameters are fields of the body itself. `chunks`: makes the events of a stream, None without streams.
    `names`: a parameter -> its field, where they differ. `key_header`: accepted instead of Authorization, with the key
    alone. `form`: of errors and headers, None for OpenAI's. `media`: media types of bodies beside JSON.
    """

    read: Callable[[bytes, int], InferenceRequest]
    write: Callable[[InferenceResult], HttpResponse]
    input_field: str = "input"
    model_field: str = "model"
    flat: bool = False
    chunks: MakeChunks | None = None
    endpoint: str = "/v1/inference"
    names: Mapping[str, str] = field(default_factory=dict)
    key_header: str = ""
    form: ResponseForm | None = None
    media: tuple[str, ...] = ()

    def bad_parameters(self, sentence: str) -> RequestError:
        """The error for the model's message about parameters, which it calls `parameters.<name>`, in the terms of this format."""
        if not self.flat:
            param = self.input_field if sentence.startswith("The input") else "parameters"
            return RequestError(ErrorCode.INVALID_REQUEST, sentence, param)
        message = sentence.removeprefix("parameters.")
        if message == sentence:
            return RequestError(ErrorCode.INVALID_REQUEST, message)
        name, space, rest = message.partition(" ")
        param = self.names.get(name, name)
        return RequestError(ErrorCode.INVALID_REQUEST, f"{param}{space}{rest}", param)

    def failure(self, reply: Reply) -> RequestError:
        """The error of a failed reply. The backend's own message is included only if it rejected the parameters."""
        try:
            code = ErrorCode(reply.error_code)
        except ValueError:  # Written by a newer version.
            code = ErrorCode.INTERNAL_ERROR
        return self.refusal(code, reply.output)

    def refusal(self, code: ErrorCode, sentence: str) -> RequestError:
        """The error of a code, with the sentence of a backend that refused the request."""
        if code is ErrorCode.INVALID_REQUEST and sentence:
            return self.bad_parameters(sentence)
        return RequestError(code, sentence if code in REFUSED and sentence else None)


INFERENCE = ApiFormat(read_inference, write_inference)


class PredictBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The request body of `POST /v1/predict`."""

    model_id: str
    input_data: Text


class PlainBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The request body of `POST /api/inference`, which uses the default model."""

    input: Text


class Prediction(msgspec.Struct, gc=False):
    """The response body of `POST /v1/predict`."""

    request_id: str
    output: str
    latency_ms: float


class PlainAnswer(msgspec.Struct, gc=False):
    """The response body of `POST /api/inference`."""

    output: str
    request_id: str
    latency_ms: float


_predict = msgspec.json.Decoder(PredictBody)
_plain = msgspec.json.Decoder(PlainBody)


def _read_predict(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    body = decode(_predict, raw)
    check_text("input_data", body.input_data, max_input_bytes)
    check_model("model_id", body.model_id)
    check_duplicates(raw)
    return InferenceRequest(body.input_data, body.model_id)


def _write_prediction(result: InferenceResult) -> HttpResponse:
    reply = result.replies[0]
    body = encode_json(Prediction(reply.id, reply.output, round(result.latency_ms, 2)))
    return completed(reply, body, result.latency_ms, result.lines)


def _read_plain(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    body = decode(_plain, raw)
    check_text("input", body.input, max_input_bytes)
    check_duplicates(raw)
    return InferenceRequest(body.input)


def _write_plain(result: InferenceResult) -> HttpResponse:
    reply = result.replies[0]
    body = encode_json(PlainAnswer(reply.output, reply.id, round(result.latency_ms, 2)))
    return completed(reply, body, result.latency_ms, result.lines)


PREDICT = ApiFormat(_read_predict, _write_prediction, "input_data", "model_id", endpoint="/v1/predict")
PLAIN = ApiFormat(_read_plain, _write_plain, endpoint="/api/inference")
