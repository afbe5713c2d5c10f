"""The body of an inference request: what is taken, and the code and field of everything that is not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType

from gateway.api.inference import MAX_PARAMETERS, read_inference
from gateway.catalog import ServedModels
from ledger.catalog.snapshot import Model, Snapshot
from scheduler.errors import ErrorCode, RequestError

INVALID, LARGE = ErrorCode.INVALID_REQUEST, ErrorCode.REQUEST_TOO_LARGE


def test_a_full_body_is_taken_apart() -> None:
    """Model, input, and parameters of scalars and lists of scalars."""
    body = read_inference(b'{"model":"m","input":"a: b","parameters":{"t":0.5,"stop":["x",":"]}}', 1000)

    assert (body.model, body.input, body.parameters) == ("m", "a: b", {"t": 0.5, "stop": ["x", ":"]})


@pytest.mark.parametrize(
    "raw",
    [
        b'{"input":"a"}',
        b' { "input" : "a:b:c" } ',
        b'{"input":"\\u003a \\"input\\": 1"}',
        b'{"input":"\\ud83d\\ude00"}',
        b'{"input":"{\\"input\\":\\"input\\"}","model":"m"}',
        b'{"input":"a","parameters":{}}',
        b'{"input":"a","parameters":{"a:b":"c:d","e":["f:g"]}}',
        b'{"input":"a","parameters":{"input":"b"}}',
    ],
)
def test_valid_bodies_are_not_taken_for_duplicates(raw: bytes) -> None:
    """Colons and quotes inside of texts, escaped or not, are no keys."""
    assert read_inference(raw, 1000).input == json.loads(raw)["input"]


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"", INVALID, None),
        (b"{", INVALID, None),
        (b"nonsense", INVALID, None),
        (b"[]", INVALID, None),
        (b'"text"', INVALID, None),
        (b"null", INVALID, None),
        (b"{}", INVALID, "input"),
        (b'{"model":"m"}', INVALID, "input"),
        (b'{"input":1}', INVALID, "input"),
        (b'{"input":null}', INVALID, "input"),
        (b'{"input":["a"]}', INVALID, "input"),
        (b'{"input":""}', INVALID, "input"),
        (b'{"input":"a","model":1}', INVALID, "model"),
        (b'{"input":"a","modell":"m"}', INVALID, "modell"),
        (b'{"input":"a","tier":"enterprise"}', INVALID, "tier"),
        (b'{"input":"a","parameters":[]}', INVALID, "parameters"),
        (b'{"input":"a","parameters":{"x":{"y":1}}}', INVALID, "parameters"),
        (b'{"input":"a","parameters":{"x":[[1]]}}', INVALID, "parameters"),
        (b'{"input":"a","parameters":{"x":NaN}}', INVALID, "x"),
        (b'{"input":"a","parameters":{"x":[1,-Infinity]}}', INVALID, "x"),
        (b'{"input":NaN}', INVALID, "input"),
        (b"[NaN", INVALID, None),
        (b'{"input":"a","parameters":{"x":1e999}}', INVALID, "parameters"),
        (b'{"input":"a","parameters":{"x":' + b"9" * 5000 + b"}}", INVALID, "parameters"),
        (b'{"input":"a","parameters":{"x":9223372036854775808}}', INVALID, "parameters"),
        (b'{"input":"a","parameters":{"x":[-9223372036854775809]}}', INVALID, "parameters"),
        (b'{"input":"a","parameters":{"' + b"x" * 65 + b'":1}}', INVALID, "parameters"),
        (b'{"input":"a","parameters":{"x":[' + b"1," * 32 + b"1]}}", INVALID, "parameters.x"),
        (b'{"input":"a","deep":' + b"[" * 100_000, INVALID, "deep"),
        (b'{"input":"a","parameters":{"x":' + b"[" * 17 + b"]" * 17 + b"}}", INVALID, "parameters"),
        (b'{"input":"\xff"}', INVALID, None),
        (b'{"input":"\xed\xa0\x80"}', INVALID, None),
        (b'{"input":"\xc0\x80"}', INVALID, None),
        (b'{"input":"\\ud800"}', INVALID, None),
        (b'\xef\xbb\xbf{"input":"a"}', INVALID, None),
        (b'{"input":"a"}{"input":"b"}', INVALID, None),
        (b'{"input":"a","input":"b"}', INVALID, "input"),
        (b'{"input":"a","inp\\u0075t":"b"}', INVALID, "input"),
        (b'{"input":"a:","input":"b"}', INVALID, "input"),
        (b'{"input":"a","input":"b::"}', INVALID, "input"),
        (b'{"input":"a" , "input" : "\\u003a\\u003a"}', INVALID, "input"),
        (b'{"input":"a","parameters":{"x":1,"x":2}}', INVALID, "x"),
        (b'{"input":"a","model":"m","model":"n"}', INVALID, "model"),
        (b'{"input":"' + b"x" * 1001 + b'"}', LARGE, "input"),
        (b'{"input":"' + "\u00e9".encode() * 501 + b'"}', LARGE, "input"),
        (b'{"input":"a","model":"' + b"m" * 129 + b'"}', ErrorCode.MODEL_NOT_FOUND, "model"),
    ],
)
def test_everything_else_is_refused_with_its_field(raw: bytes, code: ErrorCode, param: str | None) -> None:
    """One code and the field at fault."""
    with pytest.raises(RequestError) as caught:
        read_inference(raw, 1000)

    assert (caught.value.code, caught.value.param) == (code, param)


def test_too_many_parameters_are_refused() -> None:
    """Thirty-two are taken, one more is not."""
    for count in (MAX_PARAMETERS, MAX_PARAMETERS + 1):
        raw = json.dumps({"input": "a", "parameters": {f"p{i}": i for i in range(count)}}).encode()
        if count <= MAX_PARAMETERS:
            assert read_inference(raw, 1000).input == "a"
        else:
            with pytest.raises(RequestError, match="32 members"):
                read_inference(raw, 1000)


@given(st.text(min_size=1), st.booleans(), st.dictionaries(st.text(max_size=64), st.text(), max_size=4))
def test_whatever_json_writes_is_taken_whole(text: str, ascii_only: bool, parameters: dict[str, str]) -> None:
    """No valid body is refused, however its texts are escaped."""
    raw = json.dumps({"input": text, "parameters": parameters}, ensure_ascii=ascii_only).encode("utf-8", "replace")

    assert read_inference(raw, 100_000).parameters == json.loads(raw)["parameters"]


@given(st.text(min_size=1), st.text(min_size=1), st.booleans())
def test_no_duplicate_hides_behind_its_text(first: str, second: str, ascii_only: bool) -> None:
    """Two `input` fields are found whatever stands in them."""
    one, two = (json.dumps(text, ensure_ascii=ascii_only) for text in (first, second))
    raw = f'{{"input":{one},"input":{two}}}'.encode("utf-8", "replace")

    with pytest.raises(RequestError) as caught:
        read_inference(raw, 100_000)
    assert caught.value.param == "input"


def models(**enabled: bool) -> dict[str, Model]:
    return {name: Model(name, "default", 32, None, 40, 3000, 100.0, 0.8, 0, on) for name, on in enabled.items()}


def chosen(rows: dict[str, Model], pool: str, wanted: str | UnsetType, default: str | None) -> str:
    """What is chosen of these models."""
    return ServedModels(pool, default).choose(Snapshot(1, (), {}, {}, rows, ()), wanted)


@pytest.mark.parametrize(
    ("rows", "wanted", "default", "expected"),
    [
        (models(a=True), UNSET, None, "a"),
        (models(a=True, b=False), UNSET, None, "a"),
        (models(a=True, b=True), UNSET, None, None),
        (models(a=True, b=True), UNSET, "b", "b"),
        (models(a=True, b=False), UNSET, "b", "a"),
        (models(), UNSET, None, None),
        (models(a=True), "a", None, "a"),
        (models(a=False), "a", None, None),
        (models(a=True), "x", "a", None),
    ],
)
def test_the_model_is_the_wish_the_default_or_the_only_one(
    rows: dict[str, Model], wanted: str | UnsetType, default: str | None, expected: str | None
) -> None:
    """Otherwise `model_not_found` names the field."""
    if expected is not None:
        assert chosen(rows, "default", wanted, default) == expected
        return
    with pytest.raises(RequestError) as caught:
        chosen(rows, "default", wanted, default)
    assert (caught.value.code, caught.value.param) == (ErrorCode.MODEL_NOT_FOUND, "model")


def test_a_model_of_another_pool_is_not_known_here() -> None:
    """A gateway serves its own pool."""
    with pytest.raises(RequestError):
        chosen(models(a=True), "other", "a", None)
