"""What a client may send to `POST /v1/inference`, decoded and checked in one step, with the field at fault named.

Duplicate keys are looked for by a count: a body has at least one colon per key, hence no more colons outside the decoded
input than decoded keys means no duplicate. Only bodies that fail this count, because of colons in other places, are
parsed a second time.
"""

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import Asked
from gateway.http.request import MAX_NAME_CHARACTERS, check_duplicates, check_text, decode, invalid
from scheduler.errors import ErrorCode, RequestError

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


def read_inference(raw: bytes, max_input_bytes: int) -> Asked:
    """What a body asks. Raises RequestError as `decode_inference` does."""
    body = decode_inference(raw, max_input_bytes)
    parameters = {} if body.parameters is UNSET else body.parameters
    return Asked(body.input, body.model, parameters, service_tier=body.service_tier)


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
