"""Inputs of requests as tensors, and tensors as outputs. No I/O.

The input of a request is the value of the model's only input: as it is for BYTES, as JSON (a number, or lists of numbers)
for numbers. For a model of several inputs it is a JSON object with a value for each name. A parameter with the name of an
input is its value; other parameters are those of the call. A value without the dimension of rows is one row, whose output has
no such dimension either.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec

from gpu_pool.backends.backend import InvalidOutput, ItemResult
from gpu_pool.backends.function import as_results, as_vectors
from gpu_pool.backends.open_inference.model import BYTES, UNREADABLE, ModelSpec, TensorSpec
from scheduler.errors import TierlaneError

UNDECLARED = "input-0"
"""The input of a model that its server does not describe, as in the examples of MLServer and KServe."""
RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output", "headers"}
)
"""Parameters of the protocol and of Triton that would order or change the calls of other requests."""
MOST_DIMENSIONS = 16


class Mismatch(TierlaneError):
    """The input does not fit the model; the message is for the client."""


class InputValue(msgspec.Struct, frozen=True):
    """A tensor of a call, as it is sent; `data` is flat."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


class ItemTensors(NamedTuple):
    """The tensors of one request. `is_row`: they had no dimension of rows."""

    inputs: Sequence[InputValue]
    parameters: Mapping[str, Any]
    is_row: bool

    @property
    def rows(self) -> int:
        """The first dimension of all inputs; 0 if it differs."""
        first = {each.shape[0] for each in self.inputs if each.shape}
        return first.pop() if len(first) == 1 and all(each.shape for each in self.inputs) else 0

    @property
    def kind(self) -> bytes:
        """Equal for requests that can be joined."""
        return msgspec.json.encode([[(each.name, each.shape[1:]) for each in self.inputs], self.parameters])


def read_item(model: ModelSpec, text: str, parameters: Mapping[str, Any]) -> ItemTensors:
    """The tensors of a request. Raises Mismatch."""
    specs = {spec.name: spec for spec in model.inputs}
    if not specs:  # The server does not describe its model: the input is lists of numbers if it looks so, else a text.
        try:
            found: Any = msgspec.json.decode(text)
            shape, data = _flat(found) if isinstance(found, list) else ([], [])
        except (*UNREADABLE, Mismatch):
            shape, data = [], []
        specs[UNDECLARED] = TensorSpec(UNDECLARED, BYTES, (1,))
        if data and _fits("FP32", data):
            specs[UNDECLARED] = TensorSpec(UNDECLARED, "INT64" if _fits("INT64", data) else "FP32", tuple(shape))
    values = {name: value for name, value in parameters.items() if name in specs}
    others = {name: value for name, value in parameters.items() if name not in specs}
    if reserved := sorted(RESERVED & others.keys()):
        raise Mismatch(f"parameters.{reserved[0]} is not accepted by the model.")
    free = [spec for spec in specs.values() if spec.name not in values]
    needed = [spec for spec in free if spec.name not in model.optional] or free[:1]
    if len(needed) == 1 and needed[0].datatype == BYTES:
        values[needed[0].name] = text
    else:
        try:
            document = msgspec.json.decode(text)
        except UNREADABLE:
            raise Mismatch(_wanted(needed)) from None
        if not isinstance(document, dict) and len(needed) == 1:
            document = {needed[0].name: document}
        if not isinstance(document, dict) or not {each.name for each in needed} <= document.keys() <= specs.keys():
            raise Mismatch(_wanted(needed))
        values |= document
    tensors = [_tensor(specs[name], value) for name, value in values.items()]
    return ItemTensors([each for each, _ in tensors], others, all(is_row for _, is_row in tensors))


def _wanted(needed: Sequence[TensorSpec]) -> str:
    if len(needed) == 1:
        return f"The input must be JSON for {needed[0]}: a number, or lists of numbers."
    return (
        f"The input must be a JSON object with a value for each of the model's inputs: {', '.join(map(str, needed))}."
    )


def _tensor(spec: TensorSpec, value: Any) -> tuple[InputValue, bool]:
    """The tensor of a value, and whether the value has no dimension of rows. Raises Mismatch."""
    shape, data = _flat(value)
    if not data or not _fits(spec.datatype, data):
        raise Mismatch(f"The input {spec} must have {'texts' if spec.datatype == BYTES else 'values'} of its datatype.")
    missing = len(spec.shape) - len(shape)
    ones, fixed = [1] * missing, [abs(size) for size in spec.shape]
    row = [*ones, *shape]
    candidates = [row, [*shape, *ones], fixed if len(shape) == 1 and prod(fixed) == len(data) else row]
    for candidate in candidates:
        if len(candidate) == len(spec.shape) and all(
            want in (-1, size) for want, size in zip(spec.shape, candidate, strict=True)
        ):
            return InputValue(spec.name, candidate, spec.datatype, data), missing > 0 and candidate[0] == 1
    raise Mismatch(f"The input {spec} does not fit: it has the shape {shape}.")


def _flat(value: Any) -> tuple[list[int], list[Any]]:
    """Shape and elements of nested lists. Raises Mismatch unless all lists of a level have the same length."""
    shape: list[int] = []
    data = [value]
    while any(isinstance(each, list) for each in data):
        sizes = {len(each) if isinstance(each, list) else -1 for each in data}
        if len(sizes) != 1 or len(shape) == MOST_DIMENSIONS:
            raise Mismatch("The lists of the input must all have the same length at each level.")
        shape.append(sizes.pop())
        data = [element for each in data for element in each]
    return shape, data


def _fits(datatype: str, data: Sequence[Any]) -> bool:
    if datatype == BYTES:
        return all(isinstance(each, str) for each in data)
    if datatype == "BOOL":
        return all(isinstance(each, bool) for each in data)
    kinds = (int, float) if "F" in datatype else int
    return all(isinstance(each, kinds) and not isinstance(each, bool) for each in data)


def call_body(group: Sequence[ItemTensors]) -> bytes:
    """The body of one call for these requests, which are of one kind."""
    first, inputs = group[0], list(group[0].inputs)
    if len(group) > 1:
        rows = sum(each.rows for each in group)
        for place, spec in enumerate(first.inputs):
            data = [element for each in group for element in each.inputs[place].data]
            inputs[place] = InputValue(spec.name, [rows, *spec.shape[1:]], spec.datatype, data)
    body: dict[str, Any] = {"inputs": inputs}
    return msgspec.json.encode(body | ({"parameters": first.parameters} if first.parameters else {}))


class OutputValue(msgspec.Struct):
    """A tensor of a response; `data` may be nested."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


class _TensorAnswer(msgspec.Struct):
    outputs: list[OutputValue]


_answer = msgspec.json.Decoder(_TensorAnswer)


def read_outputs(body: bytes, group: Sequence[ItemTensors], vectors: Sequence[bool]) -> list[ItemResult]:
    """The result of each request of a call; `vectors`: whether it is an embedding. Raises InvalidOutput.

    The output is the text of a single BYTES element, else JSON; of several tensors an object with their names.
    """
    try:
        outputs = _answer.decode(body).outputs
        for output in outputs:
            _, output.data = _flat(output.data)
    except (*UNREADABLE, Mismatch):
        raise InvalidOutput("The server's response cannot be read.") from None
    rows = sum(each.rows for each in group)
    for each in outputs:
        if len(each.shape) > MOST_DIMENSIONS:
            raise InvalidOutput("The server's outputs have too many dimensions.")
        if prod(each.shape) != len(each.data) or (len(group) > 1 and each.shape[:1] != [rows]):
            raise InvalidOutput("The server's outputs do not have a row for each input.")
    if not outputs:
        raise InvalidOutput("The server's response has no outputs.")
    results: list[ItemResult] = []
    start = 0
    for item, as_vector in zip(group, vectors, strict=True):
        own = outputs
        if len(group) > 1:
            own = []
            for each in outputs:
                width = prod(each.shape[1:])
                data = each.data[start * width : (start + item.rows) * width]
                own.append(OutputValue(each.name, each.datatype, [item.rows, *each.shape[1:]], data))
        start += item.rows
        if as_vector:
            results += as_vectors([own[0].data], 1)
            continue
        values = {each.name: _value(each, is_row=item.is_row) for each in own}
        value = values if len(values) > 1 else next(iter(values.values()))
        results += as_results([value if isinstance(value, str) else msgspec.json.encode(value).decode()], 1)
    return results


def _value(output: OutputValue, *, is_row: bool) -> Any:
    """A text, a number, or nested lists."""
    shape, data = output.shape, output.data
    if output.datatype == BYTES and len(data) == 1:
        return data[0]
    if is_row and shape[:1] == [1]:
        shape = shape[1:]
    for size in reversed(shape):
        data = [data[at : at + size] for at in range(0, len(data), size or 1)]
    return data[0] if data else []
