"""The body of an inference request: what is valid, the code and field of what is not, and the choice of the model."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType

from gateway.api.inference import INFERENCE, MAX_PARAMETERS, read_inference
from gateway.served_models import ServedModels
from ledger.catalog.snapshot import Model, Snapshot
from scheduler.errors import ErrorCode, RequestError

INVALID, LARGE, NOT_FOUND = ErrorCode.INVALID_REQUEST, ErrorCode.REQUEST_TOO_LARGE, ErrorCode.MODEL_NOT_FOUND


def body(**members: object) -> bytes:
    return json.dumps({"input": "a"} | members).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b' { "input" : "a:b:c" } ',
        b'{"input":"\\u003a \\"input\\": 1"}',
        b'{"input":"\\ud83d\\ude00"}',
        b'{"input":"{\\"input\\":\\"input\\"}","model":"m"}',
        b'{"input":"a","parameters":{"t":0.5,"a:b":"c:d","e":["f:g"]}}',
        b'{"input":"a","parameters":{"input":"b"}}',
        body(parameters={f"p{number}": number for number in range(MAX_PARAMETERS)}),
    ],
)
def test_valid_bodies(raw: bytes) -> None:
    """Model, input, and parameters of scalars and lists of scalars. Colons and quotes in texts are not repeated members."""
    decoded, expected = read_inference(raw, 1000), json.loads(raw)

    assert (decoded.input, decoded.parameters) == (expected["input"], expected.get("parameters", {}))
    assert decoded.model == expected.get("model", UNSET)


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"", INVALID, None),
        (b"{", INVALID, None),
        (b"{}", INVALID, "input"),
        (b'{"input":1}', INVALID, "input"),
        (b'{"input":""}', INVALID, "input"),
        (body(model=1), INVALID, "model"),
        (body(tier="enterprise"), INVALID, "tier"),
        (body(parameters={"x": {"y": 1}}), INVALID, "parameters"),
        (body(parameters={"x": [[1]]}), INVALID, "parameters"),
        (body(parameters={f"p{number}": 1 for number in range(MAX_PARAMETERS + 1)}), INVALID, "parameters"),
        (body(parameters={"x" * 65: 1}), INVALID, "parameters"),
        (body(parameters={"x": [1] * 33}), INVALID, "parameters.x"),
        (body(parameters={"x": 2**63}), INVALID, "parameters"),
        (body(parameters={"x": [-(2**63) - 1]}), INVALID, "parameters"),
        (b'{"input":"a","parameters":{"x":NaN}}', INVALID, "x"),
        (b'{"input":"a","parameters":{"x":[1,-Infinity]}}', INVALID, "x"),
        (b'{"input":NaN}', INVALID, "input"),
        (b'{"input":"a","parameters":{"x":1e999}}', INVALID, "parameters"),
        (b'{"input":"a","parameters":{"x":' + b"9" * 5000 + b"}}", INVALID, "parameters"),
        (b'{"input":"a","deep":' + b"[" * 100_000, INVALID, "deep"),
        (b'{"input":"a","parameters":{"x":' + b"[" * 17 + b"]" * 17 + b"}}", INVALID, "parameters"),
        (b'{"input":"\xff"}', INVALID, None),
        (b'{"input":"\xed\xa0\x80"}', INVALID, None),
        (b'{"input":"\\ud800"}', INVALID, None),
        (b'\xef\xbb\xbf{"input":"a"}', INVALID, None),
        (b'{"input":"a"}{"input":"b"}', INVALID, None),
        (b'{"input":"a","inp\\u0075t":"b"}', INVALID, "input"),
        (b'{"input":"a:","input":"b::"}', INVALID, "input"),
        (b'{"input":"a","parameters":{"x":1,"x":2}}', INVALID, "x"),
        (b'{"input":"a","model":"m","model":"n"}', INVALID, "model"),
        (body(input="x" * 1001), LARGE, "input"),
        (b'{"input":"' + "\u00e9".encode() * 501 + b'"}', LARGE, "input"),
        (body(model="m" * 129), NOT_FOUND, "model"),
    ],
)
def test_invalid_bodies(raw: bytes, code: ErrorCode, param: str | None) -> None:
    """Each is rejected with a code and the invalid field."""
    with pytest.raises(RequestError) as error:
        read_inference(raw, 1000)

    assert (error.value.code, error.value.param) == (code, param)


@given(st.text(min_size=1), st.text(min_size=1), st.booleans(), st.dictionaries(st.text(max_size=64), st.text()))
def test_any_json_text_is_read_whole(text: str, second: str, ascii_only: bool, parameters: dict[str, str]) -> None:
    """No valid body is rejected however its texts are escaped, and a repeated `input` is always detected."""

    def encoded(value: object) -> str:
        return json.dumps(value, ensure_ascii=ascii_only)

    if len(parameters) <= MAX_PARAMETERS:
        raw = encoded({"input": text, "parameters": parameters}).encode("utf-8", "replace")
        assert read_inference(raw, 100_000).parameters == json.loads(raw)["parameters"]
    with pytest.raises(RequestError) as error:
        read_inference(f'{{"input":{encoded(text)},"input":{encoded(second)}}}'.encode("utf-8", "replace"), 100_000)
    assert error.value.param == "input"


@pytest.mark.parametrize(
    ("enabled", "requested", "default", "expected"),
    [
        ({"a": True, "b": False}, UNSET, None, "a"),
        ({"a": True, "b": True}, UNSET, None, None),
        ({"a": True, "b": True}, UNSET, "b", "b"),
        ({"a": True, "b": False}, UNSET, "b", "a"),
        ({}, UNSET, None, None),
        ({"a": True}, "a", None, "a"),
        ({"a": False}, "a", None, None),
        ({"a": True}, "x", "a", None),
    ],
)
def test_the_model_is_the_requested_the_default_or_the_only_one(
    enabled: dict[str, bool], requested: str | UnsetType, default: str | None, expected: str | None
) -> None:
    """Of the enabled models of the gateway's own pool; otherwise `model_not_found`."""
    models = {name: Model(name, "own", 32, None, 40, 100.0, 0.8, 0, on) for name, on in enabled.items()}
    catalog = Snapshot(1, (), {}, {}, models, ())
    for pool, name in (("own", expected), ("other", None)):
        if name is not None:
            assert ServedModels(pool, default).choose(catalog, requested) == name
            continue
        with pytest.raises(RequestError) as error:
            ServedModels(pool, default).choose(catalog, requested)
        assert (error.value.code, error.value.param) == (NOT_FOUND, "model")


def test_field_that_a_model_refuses() -> None:
    """A sentence of a model about its input names the input; others are about parameters."""
    sentences = ("The input must be JSON.", "parameters.top_k is not accepted by the model.")

    assert [INFERENCE.bad_parameters(sentence).param for sentence in sentences] == ["input", "parameters"]
