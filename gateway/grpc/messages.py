"""The messages of inference over gRPC: from protobuf to a request, from a result to protobuf, and the parts of a stream.

The tensors, their checks and the parameters are those of the REST form (gateway/api/open_inference/tensors.py). A response has
its elements in the form of the request: raw, or in the typed field. Messages are decoded in the stage that decodes any
body, so that a malformed one is a 400, which the library would report as an internal error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
from google.protobuf.message import DecodeError

from gateway.api.format import InferenceRequest, InferenceResult
from gateway.api.inference import ApiFormat, Parameters, completed
from gateway.api.open_inference.binary_tensors import packed, unpacked
from gateway.api.open_inference.tensors import (
    BYTES,
    TEXT_INPUT,
    TEXT_OUTPUT,
    VERSION,
    TensorRequest,
    check_input,
    check_outputs,
    result_parameters,
    tensor_request,
    texts_in,
)
from gateway.api.stream_chunks import Chunks
from gateway.grpc.open_inference_pb2 import (
    InferParameter,
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)
from gateway.http.error_responses import ErrorBody
from gateway.http.response import HttpResponse
from gateway.http.validation import MAX_NAME_CHARACTERS, invalid
from scheduler.protocol.replies import Reply

SERVICE = "inference.GRPCInferenceService"
INFER, STREAM = "ModelInfer", "ModelStreamInfer"
MAX_INTEGER = 2**63 - 1
FINAL = "triton_final_response"
_EMPTY_FINAL = "triton_enable_empty_final_response"  # Of tritonclient. The final response always comes.
FRAME_BYTES = 4

CheckModel = Callable[[str, str], None]
"""Raises RequestError unless a model of this name and version exists."""

_errors = msgspec.json.Decoder(ErrorBody)


def infer_format(check_model: CheckModel) -> ApiFormat:
    """The format of ModelInfer."""
    return ApiFormat(
        partial(read_message, check_model, stream=False),
        write_message,
        TEXT_INPUT,
        "model_name",
        endpoint=f"/{SERVICE}/{INFER}",
    )


def stream_format(check_model: CheckModel) -> ApiFormat:
    """The format of one request of ModelStreamInfer. A tensor of several elements has one response."""
    return ApiFormat(
        partial(read_message, check_model, stream=True),
        write_stream_message,
        TEXT_INPUT,
        "model_name",
        endpoint=f"/{SERVICE}/{STREAM}",
        chunks=TensorChunks,
    )


def read_message(check_model: CheckModel, raw: bytes, max_input_bytes: int, *, stream: bool) -> TensorRequest:
    """Decode and check a ModelInferRequest. Raises RequestError that names the field."""
    try:
        message = ModelInferRequest.FromString(raw)
    except DecodeError:
        raise invalid(None, "The message is not a ModelInferRequest.") from None
    check_model(message.model_name, message.model_version)
    inputs, outputs = [*message.inputs], [*message.outputs]
    check_input([tensor.name for tensor in inputs], inputs[0].datatype if inputs else "")
    check_outputs([output.name for output in outputs])
    for parameters in (*(each.parameters for each in inputs), *(each.parameters for each in outputs)):
        for name in parameters:
            raise invalid("parameters", f"The parameter `{name[:MAX_NAME_CHARACTERS]}` of a tensor is not supported.")
    (tensor,), raw_contents = inputs, message.raw_input_contents
    if raw_contents and (len(raw_contents) != 1 or tensor.HasField("contents")):
        raise invalid("raw_input_contents", "`raw_input_contents` must have one item, and `contents` be absent then.")
    elements = unpacked(raw_contents[0]) if raw_contents else tensor.contents.bytes_contents
    texts = texts_in(elements, max_input_bytes)
    values = _parameters(message.parameters)
    values.pop(_EMPTY_FINAL, None)
    return tensor_request(
        message.model_name,
        message.id,
        tensor.shape,
        texts,
        values,
        binary=bool(raw_contents),
        stream=stream and len(texts) == 1,
    )


def _parameters(sent: Mapping[str, InferParameter]) -> Parameters:
    parameters: Parameters = {}
    for name, value in sent.items():
        choice = value.WhichOneof("parameter_choice")
        found = getattr(value, choice) if choice is not None else None
        if (
            found is None
            or (isinstance(found, float) and not math.isfinite(found))
            or (choice == "uint64_param" and found > MAX_INTEGER)
        ):
            shown = name[:MAX_NAME_CHARACTERS]
            raise invalid(
                "parameters",
                f"`parameters.{shown}` must be a text, a boolean, a finite number, or an integer of 64 bits.",
            )
        parameters[name] = found
    return parameters


def write_message(result: InferenceResult) -> HttpResponse:
    """The response to completed requests, with a ModelInferResponse as body."""
    texts = [reply.output for reply in result.replies]
    message = _message(result.request, result.model, texts, result_parameters(result))
    return completed(result.replies[0], message.SerializeToString(), result.latency_ms, result.lines)


def write_stream_message(result: InferenceResult) -> HttpResponse:
    """The only response to a request of a stream that has several elements."""
    texts = [reply.output for reply in result.replies]
    message = _message(result.request, result.model, texts, result_parameters(result) | {FINAL: True})
    body = ModelStreamInferResponse(infer_response=message).SerializeToString()
    return completed(result.replies[0], body, result.latency_ms, result.lines)


def _message(
    request: InferenceRequest, model: str, texts: Sequence[str], parameters: Mapping[str, str | int | bool]
) -> ModelInferResponse:
    if not isinstance(request, TensorRequest):
        raise TypeError("This is a bug: the request has another format.")
    message = ModelInferResponse(model_name=model, model_version=VERSION, id=request.id)
    tensor = message.outputs.add(name=TEXT_OUTPUT, datatype=BYTES, shape=request.shape)
    if request.binary:
        message.raw_output_contents.append(packed(texts))
    else:
        tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    _set(message, parameters)
    return message


def _set(message: ModelInferResponse, parameters: Mapping[str, str | int | bool]) -> None:
    for name, value in parameters.items():
        if isinstance(value, str):
            message.parameters[name].string_param = value
        elif isinstance(value, bool):
            message.parameters[name].bool_param = value
        else:
            message.parameters[name].int64_param = value


class TensorChunks(Chunks):
    """The responses of one request of a stream, as frames: the text in parts, then a final one without text."""

    END = b""

    def __init__(self, request_id: str, model: str, request: InferenceRequest, _: bool) -> None:  # noqa: FBT001  # never passed on
        super().__init__(request_id, model, request)
        self._request = request

    def closing(self, reply: Reply) -> bytes:
        """The final response, with the tokens and the reason of the end."""
        result = InferenceResult((reply,), self._request, self._model, "", 0, "")
        return self._frame("", result_parameters(result) | {FINAL: True})

    def failure(self, response: HttpResponse) -> bytes:
        """The final response of a request that failed."""
        return framed(failed_message(response, self._request))

    def _chunk(self, text: str | None, finish_reason: str | None = None) -> bytes:  # noqa: ARG002  # in the final response
        return self._frame(text or "", {FINAL: False})

    def _frame(self, text: str, parameters: Mapping[str, str | int | bool]) -> bytes:
        message = _message(self._request, self._model, [text], parameters)
        return framed(ModelStreamInferResponse(infer_response=message).SerializeToString())


def failed_message(response: HttpResponse, request: InferenceRequest | None) -> bytes:
    """The ModelStreamInferResponse for an error response; `request` is None if it could not be decoded."""
    fault = _errors.decode(response.body).error
    message = ModelStreamInferResponse(error_message=fault.message)
    if isinstance(request, TensorRequest):
        message.infer_response.id = request.id
    parameters: dict[str, str | int | bool] = {
        "request_id": fault.request_id,
        "error_code": str(fault.code),
        FINAL: True,
    }
    if isinstance(fault.retry_after_ms, int):
        parameters["retry_after_ms"] = fault.retry_after_ms
    _set(message.infer_response, parameters)
    return message.SerializeToString()


def framed(message: bytes) -> bytes:
    """A message with its length, since parts of a stream may be sent together."""
    return len(message).to_bytes(FRAME_BYTES, "big") + message


def messages_of(frames: bytes) -> list[bytes]:
    """The messages of complete frames."""
    found: list[bytes] = []
    at = 0
    while at < len(frames):
        start = at + FRAME_BYTES
        at = start + int.from_bytes(frames[at:start], "big")
        found.append(frames[start:at])
    return found
