"""The native API: `POST /v1/inference`, its older forms `/v1/predict` and `/api/inference`; the type of an API format.

Bodies are decoded and checked in one step, and the error names the field. Duplicate keys are found by a count: a body
has at least one colon for each key, so no more colons outside the decoded input than decoded keys means no duplicate.
Only bodies that fail this count are parsed a second time. The 200 carries the body, `Server-Timing`, and nothing
outside the contract.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceRequest, InferenceResult
from gateway.api.stream_chunks import MakeChunks
from gateway.http.request import MAX_NAME_CHARACTERS, check_duplicates, check_text, decode, invalid
from gateway.http.response import HttpResponse, encode_json
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.replies import Reply

# Whatever runs the model reads 64 bits; a larger number would be refused much later, or be a float by then.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Scalar = str | Integer | float | bool | None

MAX_PARAMETERS = 32
MAX_LIST_ITEMS = 32
MAX_MODEL_CHARACTERS = 128

# What is checked after decoding, in sentences of our own, is only said here: for the API's description.
Text = Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1})]
_Scalars = Annotated[list[Scalar], msgspec.Meta(extra_json_schema={"maxItems": MAX_LIST_ITEMS})]
Parameters = Annotated[
    dict[str, Scalar | _Scalars],
    msgspec.Meta(
        extra_json_schema={"maxProperties": MAX_PARAMETERS, "propertyNames": {"maxLength": MAX_NAME_CHARACTERS}}
    ),
]


class InferenceBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of an inference request."""

    input: Text
    model: str | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET
    service_tier: str | None = None


_decoder = msgspec.json.Decoder(InferenceBody)


def read_inference(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    """What a body asks. Raises RequestError as `decode_inference` does."""
    body = decode_inference(raw, max_input_bytes)
    parameters = {} if body.parameters is UNSET else body.parameters
    return InferenceRequest(body.input, body.model, parameters, service_tier=body.service_tier)


def decode_inference(raw: bytes, max_input_bytes: int) -> InferenceBody:
    """Decode and check a body. Raises RequestError `invalid_request` or `request_too_large`, with `param`."""
    body = decode(_decoder, raw)
    check_text("input", body.input, max_input_bytes)
    check_model("model", body.model)
    if body.parameters is not UNSET:
        _check_parameters(body.parameters)
    _check_duplicates(raw, body)
    return body


def _check_parameters(parameters: Parameters) -> None:
    if len(parameters) > MAX_PARAMETERS:
        raise invalid("parameters", f"`parameters` must not have more than {MAX_PARAMETERS} members.")
    for name, value in parameters.items():
        if len(name) > MAX_NAME_CHARACTERS:
            raise invalid("parameters", f"A name in `parameters` is longer than {MAX_NAME_CHARACTERS} characters.")
        if isinstance(value, list) and len(value) > MAX_LIST_ITEMS:
            raise invalid(f"parameters.{name}", f"A list in `parameters` has more than {MAX_LIST_ITEMS} items.")


def _check_duplicates(raw: bytes, body: InferenceBody) -> None:
    keys = 1 + (body.model is not UNSET) + (body.service_tier is not None)
    if body.parameters is not UNSET:
        keys += 1 + len(body.parameters)
    # An escaped colon in the input would be subtracted without standing in `raw`, so escapes get the second look.
    if b"\\u" not in raw and raw.count(b":") - body.input.count(":") == keys:
        return
    check_duplicates(raw)


def check_model(param: str, name: str | UnsetType) -> None:
    """A name that is too long for any model is not worth a look. Raises RequestError."""
    if name is not UNSET and len(name) > MAX_MODEL_CHARACTERS:
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, param=param)


# RFC 9211: an answer that was kept, or the run of an equal request that was under way.
_CACHE_STATUS = {
    "cache": "Cache-Status: tierlane; hit\r\n",
    "collapsed": "Cache-Status: tierlane; fwd=miss; collapsed\r\n",
}


class Metadata(msgspec.Struct, gc=False):
    """Where the time went, and who did the work. Times in milliseconds."""

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
    """The body."""

    request_id: str
    output: str
    metadata: Metadata


def success(served: InferenceResult) -> HttpResponse:
    """The answer for a completed request."""
    reply, latency_ms = served.replies[0], served.latency_ms
    metadata = Metadata(
        tokens_used=reply.tokens_used,
        latency_ms=round(latency_ms, 2),
        queue_ms=round(max(0.0, reply.queue_ms), 2),
        gpu_ms=round(max(0.0, reply.gpu_ms), 2),
        batch_size=reply.batch_size,
        attempts=reply.attempts,
        model_version=reply.model_version,
        tier=served.tier,
        cached=reply.served_from == "cache",
    )
    return completed(reply, encode_json(Success(reply.id, reply.output, metadata)), latency_ms, served.lines)


def completed(reply: Reply, body: bytes, latency_ms: float, lines: str) -> HttpResponse:
    """A 200 with `body`: it names the request and says where the time went, whatever form its body has."""
    queue_ms, gpu_ms = max(0.0, reply.queue_ms), max(0.0, reply.gpu_ms)
    # What is neither waiting in the tier nor running: the formed batch's way to the GPU and the answer's way back.
    batch_ms = max(0.0, latency_ms - queue_ms - gpu_ms)
    answer = HttpResponse(200, body)
    answer.lines = (
        f"x-request-id: {reply.id}\r\n"
        f"Server-Timing: queue;dur={queue_ms:.1f}, batch;dur={batch_ms:.1f}, gpu;dur={gpu_ms:.1f}\r\n{lines}"
    )
    if reply.served_from:
        answer.lines += _CACHE_STATUS.get(reply.served_from, "")
    return answer


@dataclass(frozen=True, slots=True)
class ApiFormat:
    """`read`: from a body and the most bytes of an input to what is asked; raises RequestError, with the field's own name.

    `chunks`: makes the events of a stream, where there may be one. `input_field` and `model_field` are what it calls these two; `flat`: parameters are fields of the body itself. `endpoint`: its address, as it is counted.
    `write`: the answer to what was completed.
    """

    read: Callable[[bytes, int], InferenceRequest]
    write: Callable[[InferenceResult], HttpResponse]
    input_field: str = "input"
    model_field: str = "model"
    flat: bool = False
    chunks: MakeChunks | None = None
    endpoint: str = "/v1/inference"

    def bad_parameters(self, sentence: str) -> RequestError:
        """What the model says of the parameters, which it knows as `parameters.<name>`, in this door's words."""
        if not self.flat:
            return RequestError(ErrorCode.INVALID_REQUEST, sentence, "parameters")
        own = sentence.removeprefix("parameters.")
        return RequestError(ErrorCode.INVALID_REQUEST, own, None if own == sentence else own.partition(" ")[0])


INFERENCE = ApiFormat(read_inference, success)


class PredictBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of `POST /v1/predict`."""

    model_id: str
    input_data: Text


class PlainBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of `POST /api/inference`: always the default model."""

    input: Text


class Prediction(msgspec.Struct, gc=False):
    """The answer of `POST /v1/predict`; milliseconds."""

    request_id: str
    output: str
    latency_ms: float


class PlainAnswer(msgspec.Struct, gc=False):
    """The answer of `POST /api/inference`; milliseconds."""

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


def _write_prediction(served: InferenceResult) -> HttpResponse:
    reply = served.replies[0]
    body = encode_json(Prediction(reply.id, reply.output, round(served.latency_ms, 2)))
    return completed(reply, body, served.latency_ms, served.lines)


def _read_plain(raw: bytes, max_input_bytes: int) -> InferenceRequest:
    body = decode(_plain, raw)
    check_text("input", body.input, max_input_bytes)
    check_duplicates(raw)
    return InferenceRequest(body.input)


def _write_plain(served: InferenceResult) -> HttpResponse:
    reply = served.replies[0]
    body = encode_json(PlainAnswer(reply.output, reply.id, round(served.latency_ms, 2)))
    return completed(reply, body, served.latency_ms, served.lines)


PREDICT = ApiFormat(_read_predict, _write_prediction, "input_data", "model_id", endpoint="/v1/predict")
PLAIN = ApiFormat(_read_plain, _write_plain, endpoint="/api/inference")
