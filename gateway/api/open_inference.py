"""The Open Inference Protocol (KServe v2): the tensors of its REST form, and what both its forms share.

https://github.com/kserve/open-inference-protocol. A model has one input tensor, `text_input`, and one output tensor,
`text_output`. Both are BYTES with shape [N] or [N, 1]: each element is a text, and one request of a list that is admitted
as a whole or not at all. `parameters` of the request are those of the model.

Data of a tensor is JSON, or bytes behind the JSON (the binary tensor data extension, which tritonclient uses): the header
`Inference-Header-Content-Length` has the length of the JSON, and each element is its length, as 4 little-endian bytes,
and its bytes.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceRequest, InferenceResult
from gateway.api.inference import ApiFormat, Parameters, check_model, check_parameters, completed
from gateway.auth.authenticator import Authenticator
from gateway.catalog import CatalogView, IdentityView, model_not_found
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.body.text_fields import check_text
from gateway.http.errors import ErrorResponses, ResponseForm
from gateway.http.response import HttpResponse, encode_json
from gateway.http.router import Handler, RoutedRequest
from gateway.http.validation import invalid
from gateway.limits.customer_limits import CustomerLimits
from scheduler.errors import ErrorCode, RequestError

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
BYTES = "BYTES"
VERSION = "1"  # Of each model: the catalog has one row per name.
PLATFORM = "tierlane"
EXTENSIONS = ("binary_tensor_data", "parameters")
BINARY = "application/octet-stream"
JSON_LENGTH = "Inference-Header-Content-Length"
MAX_ID_CHARACTERS = 256
MAX_ELEMENTS = 10_000  # More can never be admitted together; bounds the work before that is known.
LENGTH_BYTES = 4

BINARY_SIZE, BINARY_OUTPUT = "binary_data_size", "binary_data_output"
_UNSUPPORTED = {
    "sequence_id": "models have no sequences",
    "sequence_start": "models have no sequences",
    "sequence_end": "models have no sequences",
    "priority": "the priority follows from the tier of the API key",
    "timeout": "set the deadline of the call in the client",
}
"""Parameters of the protocol's extensions that would change the result -> why they are rejected."""

_NUMBERS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Parameters that may be sent as text, because tritonclient's gRPC client cannot send a number with a fraction."""


class TensorRequest(InferenceRequest, frozen=True, gc=False):
    """A request of this protocol: also the client's own id, the shape of the tensors, and the form of the response."""

    id: str = ""
    shape: tuple[int, ...] = ()
    binary: bool = False


def tensor_request(
    model: str, request_id: str, shape: Sequence[int], texts: Sequence[str], parameters: Parameters, **fields: Any
) -> TensorRequest:
    """The request for one input tensor. Raises RequestError that names the field.

    `texts` are the elements of the tensor, which are checked already; `fields` are others of TensorRequest.
    """
    check_model("model_name", model)
    if len(request_id) > MAX_ID_CHARACTERS:
        raise invalid("id", f"`id` must not have more than {MAX_ID_CHARACTERS} characters.")
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] != 1) or shape[0] != len(texts):
        raise invalid(
            "inputs",
            f"The shape of `{TEXT_INPUT}` must be [N] or [N, 1], and N the number of its elements ({len(texts)}).",
        )
    tier = parameters.pop("service_tier", None)
    if tier is not None and not isinstance(tier, str):
        raise invalid("parameters.service_tier", "`parameters.service_tier` must be a string.")
    for name, value in parameters.items():
        if name in _UNSUPPORTED:
            raise invalid(f"parameters.{name}", f"`parameters.{name}` is not supported: {_UNSUPPORTED[name]}.")
        if name in _NUMBERS and isinstance(value, str):
            parameters[name] = _number(name, value)
    check_parameters(parameters)
    first, *more = texts
    return TensorRequest(
        first,
        model,
        parameters,
        more=tuple(more),
        service_tier=tier,
        id=request_id,
        shape=tuple(shape),
        **fields,
    )


def _number(name: str, text: str) -> float:
    try:
        return float(text[:64])
    except ValueError:
        raise invalid(f"parameters.{name}", f"`parameters.{name}` must be a number.") from None


def check_input(names: Sequence[str], datatype: str) -> None:
    """Raises RequestError unless the only input tensor is `text_input` of BYTES."""
    if list(names) != [TEXT_INPUT]:
        raise invalid("inputs", f"`inputs` must be one tensor, `{TEXT_INPUT}`; other values belong into `parameters`.")
    if datatype != BYTES:
        raise invalid("inputs", f"The datatype of `{TEXT_INPUT}` must be {BYTES}.")


def check_outputs(names: Sequence[str]) -> None:
    """Raises RequestError if a requested output tensor does not exist."""
    if names and list(names) != [TEXT_OUTPUT]:
        raise invalid("outputs", f"`outputs` must be one tensor, `{TEXT_OUTPUT}`, or absent.")


def check_version(version: str) -> None:
    """Raises RequestError for a version that no model has; an empty one is the only one."""
    if version not in ("", VERSION):
        message = f"Models have only the version {VERSION}: leave the version out."
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, message, "model_version")


def texts_in(elements: Sequence[bytes | str], max_bytes: int) -> list[str]:
    """The elements as texts. Raises RequestError for one that is empty, too large, or not UTF-8."""
    if not elements:
        raise invalid("inputs", f"`{TEXT_INPUT}` must not be empty.")
    if len(elements) > MAX_ELEMENTS:
        raise invalid("inputs", f"`{TEXT_INPUT}` must not have more than {MAX_ELEMENTS} elements.")
    try:
        texts = [each if isinstance(each, str) else each.decode() for each in elements]
    except UnicodeDecodeError:
        raise invalid("inputs", f"An element of `{TEXT_INPUT}` is not valid UTF-8.") from None
    for text in texts:
        check_text(TEXT_INPUT, text, max_bytes)
    return texts


def unpacked(data: bytes) -> list[bytes]:
    """The elements of a BYTES tensor in binary form. Raises RequestError if a length does not fit."""
    elements: list[bytes] = []
    at = 0
    while at < len(data) and len(elements) <= MAX_ELEMENTS:
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(data[at:start], "little")
        if start > len(data) or at > len(data):
            raise invalid("inputs", f"The binary data of `{TEXT_INPUT}` ends within an element.")
        elements.append(data[start:at])
    return elements


def packed(texts: Sequence[str]) -> bytes:
    """A BYTES tensor in binary form."""
    parts: list[bytes] = []
    for text in texts:
        data = text.encode()
        parts += (len(data).to_bytes(LENGTH_BYTES, "little"), data)
    return b"".join(parts)


def result_parameters(result: InferenceResult) -> dict[str, Any]:
    """The `parameters` of a response: request id, tokens, and why the text of a single request ended."""
    reply = result.replies[0]
    values: dict[str, Any] = {
        "request_id": reply.id,
        "tokens_used": sum(each.tokens_used for each in result.replies),
    }
    if len(result.replies) == 1 and reply.finish_reason:
        values["finish_reason"] = reply.finish_reason
    return values


# These limits are checked after decoding, with better messages; here they are only part of the OpenAPI schema.
def _only(value: str) -> Any:
    return msgspec.Meta(extra_json_schema={"const": value})


_Shape = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]],
    msgspec.Meta(extra_json_schema={"minItems": 1, "maxItems": 2}, description="[N] or [N, 1], of N elements."),
]
_ONE = msgspec.Meta(extra_json_schema={"minItems": 1, "maxItems": 1})
_AT_MOST_ONE = msgspec.Meta(extra_json_schema={"maxItems": 1})


class InputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`binary_data_size`: the number of bytes behind the JSON, if the elements are there."""

    binary_data_size: int | UnsetType = UNSET


class InputTensor(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The input tensor. `data`: its texts, flat or as rows of one; absent if the data is binary."""

    name: Annotated[str, _only(TEXT_INPUT)]
    shape: _Shape
    datatype: Annotated[str, _only(BYTES)]
    data: Annotated[list[str | list[str]], msgspec.Meta(extra_json_schema={"minItems": 1})] | UnsetType = UNSET
    parameters: InputParameters = InputParameters()


class OutputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`binary_data`: whether the elements come as bytes behind the JSON."""

    binary_data: bool | UnsetType = UNSET


class OutputSelection(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A requested output tensor."""

    name: Annotated[str, _only(TEXT_OUTPUT)]
    parameters: OutputParameters = OutputParameters()


class TensorBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The JSON of `POST /v2/models/{id}/infer`."""

    inputs: Annotated[list[InputTensor], _ONE]
    id: Annotated[str, msgspec.Meta(extra_json_schema={"maxLength": MAX_ID_CHARACTERS})] = ""
    parameters: Parameters = {}
    outputs: Annotated[list[OutputSelection], _AT_MOST_ONE] = []


class OutputTensor(msgspec.Struct, gc=False):
    """The output tensor. `data` is absent if it is binary."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[str] | UnsetType = UNSET
    parameters: dict[str, int] | UnsetType = UNSET


class TensorResponse(msgspec.Struct, gc=False):
    """The JSON of the response. `parameters`: request id, tokens, reason of the end."""

    model_name: str
    model_version: str
    parameters: dict[str, str | int]
    outputs: list[OutputTensor]
    id: str | UnsetType = UNSET


_decoder = msgspec.json.Decoder(TensorBody)
_LENGTH = re.compile(r"[0-9]{1,18}")


def read_tensors(raw: bytes, max_input_bytes: int, *, model: str, json_length: str | None) -> TensorRequest:
    """Decode and check a body. Raises RequestError that names the field.

    `json_length`: the value of `Inference-Header-Content-Length`, None without one.
    """
    length = len(raw) if json_length is None else int(json_length) if _LENGTH.fullmatch(json_length) else -1
    if not 0 <= length <= len(raw):
        raise invalid(JSON_LENGTH, f"{JSON_LENGTH} must be the number of bytes of JSON in the body.")
    head, binary = raw[:length], raw[length:]
    body = decode(_decoder, head)
    check_duplicates(head)
    check_input([tensor.name for tensor in body.inputs], body.inputs[0].datatype if body.inputs else "")
    check_outputs([output.name for output in body.outputs])
    parameters = dict(body.parameters)
    wants_binary = parameters.pop(BINARY_OUTPUT, False)
    if not isinstance(wants_binary, bool):
        raise invalid(f"parameters.{BINARY_OUTPUT}", f"`parameters.{BINARY_OUTPUT}` must be true or false.")
    for output in body.outputs:
        wants_binary = wants_binary if output.parameters.binary_data is UNSET else output.parameters.binary_data
    (tensor,) = body.inputs
    texts = texts_in(_elements(tensor, binary), max_input_bytes)
    return tensor_request(model, body.id, tensor.shape, texts, parameters, binary=wants_binary)


def _elements(tensor: InputTensor, binary: bytes) -> Sequence[bytes | str]:
    """The elements of the tensor, from JSON or from the bytes behind it."""
    size = tensor.parameters.binary_data_size
    if size is UNSET:
        if binary:
            raise invalid("inputs", f"Binary data needs the parameter `{BINARY_SIZE}` of `{TEXT_INPUT}`.")
        if tensor.data is UNSET:
            raise invalid("inputs", f"`{TEXT_INPUT}` has no data: send `data`, or binary data with `{BINARY_SIZE}`.")
        return _flat(tensor.data)
    if tensor.data is not UNSET:
        raise invalid("inputs", f"`{TEXT_INPUT}` has both `data` and `{BINARY_SIZE}`: send one of them.")
    if size != len(binary):
        message = f"`{BINARY_SIZE}` must be the number of bytes behind the JSON, which is {len(binary)}."
        raise invalid("inputs", message)
    return unpacked(binary)


def _flat(data: list[str | list[str]]) -> list[str]:
    texts: list[str] = []
    for each in data:
        if isinstance(each, list) and len(each) != 1:
            raise invalid("inputs", f"A row of `{TEXT_INPUT}` must have one text.")
        texts.append(each if isinstance(each, str) else each[0])
    return texts


def write_tensors(result: InferenceResult) -> HttpResponse:
    """Write the response to completed requests: one element per text."""
    request = result.request
    if not isinstance(request, TensorRequest):
        raise TypeError("This is a bug: the request has another format.")
    texts = [reply.output for reply in result.replies]
    output = OutputTensor(TEXT_OUTPUT, BYTES, request.shape)
    binary = b""
    if request.binary:
        binary = packed(texts)
        output.parameters = {BINARY_SIZE: len(binary)}
    else:
        output.data = texts
    document = TensorResponse(result.model, VERSION, result_parameters(result), [output], request.id or UNSET)
    head = encode_json(document)
    response = completed(result.replies[0], head + binary, result.latency_ms, result.lines)
    if request.binary:
        response.content_type = BINARY
        response.lines += f"{JSON_LENGTH}: {len(head)}\r\n"
    return response


class TensorMetadata(msgspec.Struct, gc=False):
    """A tensor of a model; -1 is a dimension of any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(msgspec.Struct, gc=False):
    """A model. All models have the same tensors."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def _tensor(name: str) -> TensorMetadata:
    return TensorMetadata(name, BYTES, (-1,))


class ServerMetadata(msgspec.Struct, gc=False):
    """The server."""

    name: str
    version: str
    extensions: tuple[str, ...]


class ServerLive(msgspec.Struct, gc=False):
    """The event loop is running."""

    live: bool


class ServerReady(msgspec.Struct, gc=False):
    """Whether the gateway accepts traffic."""

    ready: bool


class ModelReady(msgspec.Struct, gc=False):
    """Whether requests of the model are served."""

    name: str
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenInferenceParts:
    """What both forms of the protocol use."""

    authenticator: Authenticator
    catalog: CatalogView
    limits_of: Callable[[IdentityView], CustomerLimits]
    error_responses: ErrorResponses
    names: Callable[[], Collection[str]]  # Of all models that requests can name.
    not_ready: Callable[[], str | None]  # What the gateway is waiting for; None if it accepts traffic.
    model_ready: Callable[[str], bool]  # Whether the pool of a model has a healthy GPU.
    version: str

    def check_model(self, model: str, version: str) -> None:
        """Raises RequestError `model_not_found` unless the model is in the catalog, in this version.

        A model whose pool is still being started is in the catalog: the pipeline rejects its requests for now.
        """
        check_version(version)
        row = self.catalog.snapshot.models.get(model) if self.catalog.snapshot is not None else None
        if row is None or not row.enabled:
            raise model_not_found("model_name", self.names())

    def metadata(self, model: str, version: str) -> "ModelMetadata":
        """The description of a model. Raises RequestError `model_not_found`."""
        self.check_model(model, version)
        return ModelMetadata(model, (VERSION,), PLATFORM, (_tensor(TEXT_INPUT),), (_tensor(TEXT_OUTPUT),))

    def readiness(self, model: str, version: str) -> "ModelReady":
        """Whether requests of a model are served. Raises RequestError `model_not_found`."""
        self.check_model(model, version)
        return ModelReady(model, self.not_ready() is None and self.model_ready(model))


T = TypeVar("T")


class OpenInference:
    """The handlers of the REST form. `handler`: makes the handler of inference requests in a format."""

    def __init__(self, parts: OpenInferenceParts, handler: Callable[[ApiFormat], Handler]) -> None:
        self.parts = parts
        self._handler = handler
        self._server = ServerMetadata("tierlane", parts.version, EXTENSIONS)

    async def server(self, request: RoutedRequest) -> HttpResponse:
        """`GET /v2`."""
        return HttpResponse.of(200, self._server, [("x-request-id", request.request_id)])

    async def live(self, request: RoutedRequest) -> HttpResponse:
        """`GET /v2/health/live`."""
        return HttpResponse.of(200, ServerLive(live=True), [("x-request-id", request.request_id)])

    async def ready(self, request: RoutedRequest) -> HttpResponse:
        """`GET /v2/health/ready`: 503 unless the gateway accepts traffic."""
        ready = self.parts.not_ready() is None
        return HttpResponse.of(200 if ready else 503, ServerReady(ready), [("x-request-id", request.request_id)])

    async def model(self, request: RoutedRequest) -> HttpResponse:
        """`GET /v2/models/{id...}`. Raises RequestError for an unknown caller."""
        return self._described(request, self.parts.metadata, lambda _: 200)

    async def model_ready(self, request: RoutedRequest) -> HttpResponse:
        """`GET /v2/models/{id...}/ready`: 503 if it is not. Raises RequestError for an unknown caller."""
        return self._described(request, self.parts.readiness, lambda found: 200 if found.ready else 503)

    async def infer(self, request: RoutedRequest) -> HttpResponse:
        """`POST /v2/models/{id...}/infer`. Raises RequestError for an unknown caller."""
        length = request.headers.get(JSON_LENGTH)

        def read(raw: bytes, max_input_bytes: int) -> TensorRequest:
            model, version = model_and_version(request.tail)
            self.parts.check_model(model, version)
            return read_tensors(raw, max_input_bytes, model=model, json_length=length)

        return await self._handler(
            ApiFormat(
                read,
                write_tensors,
                TEXT_INPUT,
                "model_name",
                endpoint=INFER,
                media=(BINARY,),
                form=TENSOR_FORM,
            )
        )(request)

    def _described(
        self, request: RoutedRequest, describe: Callable[[str, str], T], status: Callable[[T], int]
    ) -> HttpResponse:
        identity = self.parts.authenticator.identify(request)
        headers = self.parts.limits_of(identity).headers(identity)
        try:
            document = describe(*model_and_version(request.tail))
        except RequestError as error:
            return self.parts.error_responses.answer(error, request.request_id, headers, form=TENSOR_FORM)
        return HttpResponse.of(status(document), document, [("x-request-id", request.request_id), *headers])


class PlainError(msgspec.Struct, gc=False):
    """The body of an error of the Open Inference Protocol, whose `error` is a text."""

    error: str
    code: ErrorCode
    request_id: str
    param: str | None
    retry_after_ms: int | UnsetType = UNSET


def plain_error(error: RequestError, request_id: str, retry_after_ms: int | UnsetType) -> PlainError:
    """The body for a request error."""
    return PlainError(error.message, error.code, request_id, error.param, retry_after_ms)


TENSOR_FORM = ResponseForm(plain_error, lambda _request_id, _lines: "")


def model_and_version(tail: str) -> tuple[str, str]:
    """The model and the version, "" without one, of a path."""
    model, found, version = tail.rpartition("/versions/")
    return (unquote(model), unquote(version)) if found else (unquote(tail), "")


INFER = "/v2/models/{id...}/infer"
"""The route, which is the name of the endpoint in metrics and logs."""
