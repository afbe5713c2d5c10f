"""`oip:URL` without a server: inputs as tensors, tensors as outputs, what a model's description means."""

import json
from typing import Any

import msgspec
import pytest

from gpu_pool.backends.backend import InvalidOutput
from gpu_pool.backends.open_inference.model import ModelSpec, TensorSpec, read_model
from gpu_pool.backends.open_inference.tensors import Mismatch, call_body, read_item, read_outputs
from scheduler.payload import Task
from scheduler.vectors import read_vector

TEXT = TensorSpec("text", "BYTES", (-1, 1))
ROW = TensorSpec("x", "FP32", (-1, 3))
COUNT = TensorSpec("max_tokens", "INT32", (-1, 1))


def model(*specs: TensorSpec, **more: Any) -> ModelSpec:
    return ModelSpec(specs, **more)


def sent(spec: ModelSpec, text: str, **parameters: Any) -> dict[str, Any]:
    """Shape and data of each input of the call."""
    body = json.loads(call_body([read_item(spec, text, parameters)]))
    return {each["name"]: (each["datatype"], each["shape"], each["data"]) for each in body["inputs"]}


@pytest.mark.parametrize(
    ("spec", "text", "parameters", "expected"),
    [
        (model(TEXT), "[1, 2]", {}, {"text": ("BYTES", [1, 1], ["[1, 2]"])}),
        (model(TensorSpec("t", "BYTES", (1,))), "a", {}, {"t": ("BYTES", [1], ["a"])}),
        (model(ROW), "[1, 2.5, 3]", {}, {"x": ("FP32", [1, 3], [1, 2.5, 3])}),
        (model(ROW), "[[1, 2, 3], [4, 5, 6]]", {}, {"x": ("FP32", [2, 3], [1, 2, 3, 4, 5, 6])}),
        (model(ROW), '{"x": [1, 2, 3]}', {}, {"x": ("FP32", [1, 3], [1, 2, 3])}),
        (model(TensorSpec("x", "FP32", (2, 2))), "[1, 2, 3, 4]", {}, {"x": ("FP32", [2, 2], [1, 2, 3, 4])}),
        (model(TensorSpec("x", "BOOL", (-1,))), "[true, false]", {}, {"x": ("BOOL", [2], [True, False])}),
        (model(TensorSpec("x", "INT64", (-1, 1))), "7", {}, {"x": ("INT64", [1, 1], [7])}),
        (model(TEXT, COUNT), "a", {"max_tokens": 9}, {"max_tokens": ("INT32", [1, 1], [9]), "text": ("BYTES", [1, 1], ["a"])}),
        (model(TEXT, COUNT, optional=frozenset({"max_tokens"})), "a", {}, {"text": ("BYTES", [1, 1], ["a"])}),
        (
            model(TEXT, ROW),
            '{"text": "a", "x": [1, 2, 3]}',
            {},
            {"text": ("BYTES", [1, 1], ["a"]), "x": ("FP32", [1, 3], [1, 2, 3])},
        ),
        (model(), "a", {}, {"input-0": ("BYTES", [1], ["a"])}),
        (model(), "[[1, 2]]", {}, {"input-0": ("INT64", [1, 2], [1, 2])}),
        (model(), "[0.5, 2]", {}, {"input-0": ("FP32", [2], [0.5, 2])}),
        (model(), "[1, [2]]", {}, {"input-0": ("BYTES", [1], ["[1, [2]]"])}),
    ],
)  # fmt: skip
def test_inputs(spec: ModelSpec, text: str, parameters: dict[str, Any], expected: dict[str, Any]) -> None:
    """A text is the only BYTES input; other values are JSON, by name if there are several; parameters may be inputs."""
    assert sent(spec, text, **parameters) == expected


@pytest.mark.parametrize(
    ("spec", "text", "parameters", "sentence"),
    [
        (model(ROW), "hello", {}, "The input must be JSON for `x` (FP32 [-1, 3]): a number, or lists of numbers."),
        (model(ROW), "[1, 2]", {}, "The input `x` (FP32 [-1, 3]) does not fit: it has the shape [2]."),
        (model(ROW), "[[[1, 2, 3]]]", {}, "The input `x` (FP32 [-1, 3]) does not fit: it has the shape [1, 1, 3]."),
        (model(ROW), '["a", "b", "c"]', {}, "The input `x` (FP32 [-1, 3]) must have values of its datatype."),
        (model(ROW), "[]", {}, "The input `x` (FP32 [-1, 3]) must have values of its datatype."),
        (model(ROW), "[1, [2, 3]]", {}, "The lists of the input must all have the same length at each level."),
        (model(ROW), '{"y": 1}', {}, "The input must be JSON for `x` (FP32 [-1, 3]): a number, or lists of numbers."),
        (model(COUNT), "0.5", {}, "The input `max_tokens` (INT32 [-1, 1]) must have values of its datatype."),
        (model(COUNT), "true", {}, "The input `max_tokens` (INT32 [-1, 1]) must have values of its datatype."),
        (
            model(TEXT, ROW),
            '{"x": [1, 2, 3]}',
            {},
            f"The input must be a JSON object with a value for each of the model's inputs: {TEXT}, {ROW}.",
        ),
        (model(TEXT), "a", {"priority": 1}, "parameters.priority is not accepted by the model."),
    ],
)
def test_inputs_that_do_not_fit(spec: ModelSpec, text: str, parameters: dict[str, Any], sentence: str) -> None:
    """The sentence is for the client."""
    with pytest.raises(Mismatch) as error:
        read_item(spec, text, parameters)

    assert str(error.value) == sentence


def test_other_parameters_are_those_of_the_call() -> None:
    """The server interprets them; requests with different ones, or rows of another size, are not joined."""
    one, other = (read_item(model(TEXT), "a", {"top_k": value}) for value in (1, 2))

    assert json.loads(call_body([one]))["parameters"] == {"top_k": 1}
    assert one.kind != other.kind
    assert one.kind == read_item(model(TEXT), "other", {"top_k": 1}).kind


BINARY = b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 1], "parameters": {"binary_data_size": 8}}]}'


def output(*tensors: tuple[str, str, list[int], list[Any]]) -> bytes:
    names = ("name", "datatype", "shape", "data")
    return msgspec.json.encode({"outputs": [dict(zip(names, each, strict=True)) for each in tensors]})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (output(("y", "BYTES", [1, 1], ["hello"])), "hello"),
        (output(("y", "BYTES", [1, 2], ["a", "b"])), '["a","b"]'),
        (output(("y", "FP32", [1, 2], [[0.25, 1]])), "[0.25,1]"),
        (output(("y", "FP32", [1, 2, 1], [0.25, 1])), "[[0.25],[1]]"),
        (output(("y", "INT64", [1], [3])), "3"),
        (output(("label", "BYTES", [1], ["cat"]), ("score", "FP32", [1, 1], [0.5])), '{"label":"cat","score":[0.5]}'),
    ],
)
def test_outputs(body: bytes, expected: str) -> None:
    """One text is the output itself; else JSON, without the dimension of rows if the input had none."""
    assert [each.output for each in read_outputs(body, [read_item(model(TEXT), "a", {})], [False])] == [expected]


def test_outputs_of_joined_requests_are_split() -> None:
    """By the rows of each request."""
    group = [read_item(model(ROW), text, {}) for text in ("[1, 2, 3]", "[[4, 5, 6], [7, 8, 9]]", "[0, 0, 0]")]

    assert json.loads(call_body(group))["inputs"][0]["shape"] == [4, 3]
    results = read_outputs(output(("y", "FP32", [4, 1], [1, 2, 3, 4])), group, [False, False, True])

    assert [each.output for each in results[:2]] == ["[1]", "[[2],[3]]"]
    assert read_vector(results[2].output) == [4.0]


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"{}",
        output(),
        output(("y", "FP32", [2, 2], [1])),
        output(("y", "FP32", [1, 1], [1])),
        output(("y", "FP32", [2] + [1] * 50_000, [1, 2])),
        output(("y", "FP32", [-2, -1], [1, 2])),
        BINARY,
        BINARY + bytes(8),
    ],
)
def test_unusable_outputs(body: bytes) -> None:
    """Joined requests need a row for each input; binary data were not asked for, and are not understood."""
    group = [read_item(model(ROW), "[1, 2, 3]", {})] * 2

    with pytest.raises(InvalidOutput):
        read_outputs(body, group, [False, False])


def described(*inputs: tuple[str, list[int]], output: str = "BYTES", config: Any = None) -> ModelSpec:
    tensors = [{"name": f"i{at}", "datatype": datatype, "shape": shape} for at, (datatype, shape) in enumerate(inputs)]
    outputs = [{"name": "y", "datatype": output, "shape": [-1]}]
    metadata = {"name": "m", "versions": None, "platform": "p", "inputs": tensors, "outputs": outputs}
    return read_model(msgspec.json.encode(metadata), msgspec.json.encode(config) if config else b"")


def test_which_requests_are_joined() -> None:
    """Those of a model whose inputs all have a first dimension of any size, or that Triton's configuration allows."""
    config = {
        "max_batch_size": 8,
        "input": [{"name": "i0", "optional": True}],
        "instance_group": [{"count": 2, "gpus": [0, 1]}],
    }

    assert [described((kind, shape)).most_rows for kind, shape in (("BYTES", [-1]), ("FP32", [-1, 3]))] == [32, 32]
    assert [described((kind, shape)).most_rows for kind, shape in (("FP32", [-1]), ("FP32", [1, 3]))] == [0, 0]
    assert described(("FP32", [-1, 3]), ("FP32", [3])).most_rows == 0
    assert described().most_rows == 0
    seen = described(("FP32", [-1]), config=config)
    assert (seen.most_rows, seen.calls, seen.optional) == (8, 5, frozenset({"i0"}))
    assert described(("BYTES", [-1]), config={"max_batch_size": 0}).most_rows == 0


def test_tasks_of_a_model() -> None:
    """A text input takes chats too; with one output of numbers it makes embeddings."""
    assert described(("FP32", [-1, 3])).tasks == {Task.COMPLETE}
    assert described(("BYTES", [-1])).tasks == {Task.COMPLETE, Task.CHAT}
    assert described(("BYTES", [-1]), output="FP32").tasks == {Task.COMPLETE, Task.CHAT, Task.EMBED}
    with pytest.raises(InvalidOutput):
        read_model(b"<html>", b"")
