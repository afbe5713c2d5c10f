"""The bodies of inference requests in the REST form of the Open Inference Protocol.

Data of a tensor is JSON, or bytes behind the JSON (the binary tensor data extension, which tritonclient uses): the header
`Inference-Header-Content-Length` has the length of the JSON.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceResult
from gateway.api.inference import Parameters, completed
from gateway.api.open_inference.binary_tensors import packed, unpacked
from gateway.api.open_inference.tensors import (
    BYTES,
    MAX_ID_CHARACTERS,
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
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.response import HttpResponse, encode_json
from gateway.http.validation import invalid

BINARY = "application/octet-stream"
JSON_LENGTH = "Inference-Header-Content-Length"
BINARY_SIZE, BINARY_OUTPUT = "binary_data_size", "binary_data_output"

# These limits are checked after decoding, with better messages; here they are only part of the OpenAPI schema.
_Shape = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]],
    msgspec.Meta(extra_json_schema={"minItems": 1, "maxItems": 2}, description="[N] or [N, 1], of N elements."),
]
_ONE = msgspec.Meta(extra_json_schema={"minItems": 1, "maxItems": 1})
_AT_MOST_ONE = msgspec.Meta(extra_json_schema={"maxItems": 1})
_LENGTH = re.compile(r"[0-9]{1,18}")


def _only(value: str) -> Any:
    return msgspec.Meta(extra_json_schema={"const": value})


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
