"""The tensors of the Open Inference Protocol: what is read, what is written, and what is rejected by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.format import InferenceResult
from gateway.api.open_inference.binary_tensors import packed, unpacked
from gateway.api.open_inference.endpoints import model_and_version
from gateway.api.open_inference.rest_tensors import read_tensors, write_tensors
from gateway.api.open_inference.tensors import TensorRequest
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.replies import Reply

TENSOR: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}
MOST = 100


def read(body: Any, binary: bytes = b"", json_length: str | None = None) -> TensorRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    if binary and json_length is None:
        json_length = str(len(raw))
    return read_tensors(raw + binary, MOST, model="tiny", json_length=json_length)


def tensor(**changes: Any) -> dict[str, Any]:
    """A body with one tensor; a change to None removes the field."""
    return {"inputs": [{name: value for name, value in (TENSOR | changes).items() if value is not None}]}


def reply(text: str) -> Reply:
    return Reply("req_1", "acme", "n", "completed", "", 1, 1.0, "b", 4, "w", 50.0, 3, "v1", text)


def test_json_and_binary_data_are_the_same_request() -> None:
    """The elements are the input and `more`; the form of the response is the requested one."""
    data = packed(["one", "zwei \u00fc"])
    flat = read(tensor(shape=[2], data=["one", "zwei \u00fc"]) | {"id": "7", "parameters": {"max_tokens": 4}})
    rows = read(tensor(shape=[2, 1], data=[["one"], ["zwei \u00fc"]]))
    binary = read(
        tensor(shape=[2], data=None, parameters={"binary_data_size": len(data)})
        | {"parameters": {"binary_data_output": True}},
        data,
    )

    assert (flat.input, flat.more, flat.model) == ("one", ("zwei \u00fc",), "tiny")
    assert (flat.id, flat.parameters, flat.shape, flat.binary) == ("7", {"max_tokens": 4}, (2,), False)
    assert (rows.input, rows.more, rows.shape) == ("one", ("zwei \u00fc",), (2, 1))
    assert (binary.input, binary.more, binary.parameters, binary.binary) == ("one", ("zwei \u00fc",), {}, True)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "empty"),
        (b"[]", None, "object"),
        ({"inputs": []}, "inputs", "one tensor"),
        ({"inputs": [TENSOR, TENSOR]}, "inputs", "one tensor"),
        (tensor(name="stream"), "inputs", "text_input"),
        (tensor(datatype="FP32"), "inputs", "BYTES"),
        (tensor(shape=[2]), "inputs", "shape"),
        (tensor(shape=[1, 2]), "inputs", "shape"),
        (tensor(shape=[1, 1, 1]), "inputs", "shape"),
        (tensor(shape=[-1]), "inputs", "at least 0"),
        (tensor(data=[]), "inputs", "empty"),
        (tensor(data=[""]), "text_input", "empty"),
        (tensor(data=[["a", "b"]]), "inputs", "row"),
        (tensor(data=[1]), "inputs", "string"),
        (tensor(data=None), "inputs", "no data"),
        (tensor(parameters={"binary_data_size": 0}), "inputs", "both"),
        (tensor(data=None, parameters={"binary_data_size": 5}), "inputs", "bytes behind"),
        (tensor(parameters={"shared_memory_region": "r"}), "shared_memory_region", "not known"),
        (tensor() | {"outputs": [{"name": "logits"}]}, "outputs", "text_output"),
        (
            tensor() | {"outputs": [{"name": "text_output", "parameters": {"classification": 3}}]},
            "classification",
            "not known",
        ),
        (tensor() | {"parameters": {"binary_data_output": 1}}, "parameters.binary_data_output", "true or false"),
        (tensor() | {"parameters": {"sequence_id": 1}}, "parameters.sequence_id", "sequences"),
        (tensor() | {"parameters": {"priority": 1}}, "parameters.priority", "tier"),
        (tensor() | {"parameters": {"temperature": "warm"}}, "parameters.temperature", "number"),
        (tensor() | {"parameters": {"service_tier": 1}}, "parameters.service_tier", "string"),
        (tensor() | {"id": "x" * 257}, "id", "256"),
        (tensor() | {"beams": 2}, "beams", "not known"),
        (b'{"inputs": [], "inputs": []}', "inputs", "twice"),
    ],
)
def test_bodies_are_rejected_by_name(body: Any, param: str | None, words: str) -> None:
    """The error names the field and the fault."""
    with pytest.raises(RequestError) as caught:
        read(body)

    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)
    assert words in caught.value.message


@pytest.mark.parametrize("length", ["", "x", "-1", "9999", "\u00b2", "1_0", "9" * 5000])
def test_the_length_of_the_json_is_checked(length: str) -> None:
    """Against the number of bytes that arrived."""
    with pytest.raises(RequestError) as caught:
        read(tensor(), json_length=length)

    assert caught.value.param == "Inference-Header-Content-Length"


@given(st.binary(max_size=64))
def test_any_binary_data_is_read_or_rejected(data: bytes) -> None:
    """Elements that were read are written as the same bytes."""
    try:
        elements = unpacked(data)
    except RequestError as error:
        assert error.param == "inputs"  # noqa: PT017  # read or rejected, never another exception
    else:
        assert b"".join(len(each).to_bytes(4, "little") + each for each in elements) == data


@pytest.mark.parametrize("binary", [False, True])
def test_the_response_has_the_shape_of_the_request(binary: bool) -> None:
    """Binary data is behind the JSON, whose length is a header."""
    request = TensorRequest("a", "tiny", more=("b",), id="7", shape=(2, 1), binary=binary)
    response = write_tensors(InferenceResult((reply("x"), reply("\u00fc")), request, "tiny", "free", 5.0, ""))
    lines = dict(line.split(": ") for line in response.lines.strip().split("\r\n"))
    length = int(lines.get("Inference-Header-Content-Length", len(response.body)))
    document = json.loads(response.body[:length])
    output = document["outputs"][0]

    assert (document["id"], document["model_name"], document["model_version"]) == ("7", "tiny", "1")
    assert document["parameters"] == {"request_id": "req_1", "tokens_used": 6}
    assert (output["name"], output["datatype"], output["shape"]) == ("text_output", "BYTES", [2, 1])
    if binary:
        assert response.content_type == "application/octet-stream"
        assert output["parameters"] == {"binary_data_size": len(response.body) - length}
        assert unpacked(response.body[length:]) == [b"x", "\u00fc".encode()]
    else:
        assert output["data"] == ["x", "\u00fc"]


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("tiny", ("tiny", "")),
        ("org/small", ("org/small", "")),
        ("org%2Fsmall/versions/1", ("org/small", "1")),
        ("a/versions/1/versions/2", ("a/versions/1", "2")),
    ],
)
def test_the_model_in_the_path(tail: str, expected: tuple[str, str]) -> None:
    """A name may contain slashes; a version may follow."""
    assert model_and_version(tail) == expected
