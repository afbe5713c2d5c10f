"""What a client may send to `POST /v1/inference`, decoded and checked in one step, with the field at fault named.

msgspec refuses unknown fields, wrong types, NaN, bad UTF-8 and (by the types) deep nesting. It lets the last of two
equal keys win, which would let one body mean two things to two readers, so duplicates are looked for: a body has at
least one colon per key, hence no more colons outside the decoded input than decoded keys means no duplicate. Only
bodies that fail this count, because of colons in other places, are parsed a second time.
"""

import json
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.errors import ErrorCode, RequestError

# Whatever runs the model reads 64 bits; a larger number would be refused much later, or be a float by then.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Scalar = str | Integer | float | bool | None
Parameters = dict[str, Scalar | list[Scalar]]

MAX_PARAMETERS = 32
MAX_LIST_ITEMS = 32
MAX_NAME_CHARACTERS = 64  # Of a parameter's name, and of a field's name that is told back.
MAX_MODEL_CHARACTERS = 128


class InferenceBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of an inference request."""

    input: str
    model: str | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET


_decoder = msgspec.json.Decoder(InferenceBody)
_NO_NUMBER = object()  # Stands for NaN and Infinity while their field is looked for.


def decode_inference(raw: bytes, max_input_bytes: int) -> InferenceBody:
    """Decode and check a body. Raises RequestError `invalid_request` or `request_too_large`, with `param`."""
    try:
        body = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _not_json(raw) from None
    _check_input(body.input, max_input_bytes)
    if body.model is not UNSET and len(body.model) > MAX_MODEL_CHARACTERS:
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, param="model")
    if body.parameters is not UNSET:
        _check_parameters(body.parameters)
    _check_duplicates(raw, body)
    return body


def _not_json(raw: bytes) -> RequestError:
    """The error for a body that is not JSON: with its field where a NaN is at fault, since many encoders write it."""
    try:
        json.loads(raw, object_pairs_hook=_refuse_no_number, parse_constant=lambda _: _NO_NUMBER)
    except RequestError as error:
        return error
    except (ValueError, RecursionError):
        pass
    return _invalid(None, "The body is not valid JSON in UTF-8.")


def _refuse_no_number(pairs: list[tuple[str, Any]]) -> None:
    for name, value in pairs:
        if value is _NO_NUMBER or (isinstance(value, list) and _NO_NUMBER in value):
            field = name[:MAX_NAME_CHARACTERS]
            raise _invalid(field, f"`{field}` is NaN or infinite, which JSON has no word for.")


def _check_input(text: str, max_input_bytes: int) -> None:
    if not text:
        raise _invalid("input", "`input` must not be empty.")
    # A character has one to four bytes, so most texts need no encoding to be judged.
    if len(text) * 4 > max_input_bytes and len(text.encode()) > max_input_bytes:
        message = f"`input` must not be larger than {max_input_bytes} bytes."
        raise RequestError(ErrorCode.REQUEST_TOO_LARGE, message, "input")


def _check_parameters(parameters: Parameters) -> None:
    if len(parameters) > MAX_PARAMETERS:
        raise _invalid("parameters", f"`parameters` must not have more than {MAX_PARAMETERS} members.")
    for name, value in parameters.items():
        if len(name) > MAX_NAME_CHARACTERS:
            raise _invalid("parameters", f"A name in `parameters` is longer than {MAX_NAME_CHARACTERS} characters.")
        if isinstance(value, list) and len(value) > MAX_LIST_ITEMS:
            raise _invalid(f"parameters.{name}", f"A list in `parameters` has more than {MAX_LIST_ITEMS} items.")


def _check_duplicates(raw: bytes, body: InferenceBody) -> None:
    keys = 1 + (body.model is not UNSET)
    if body.parameters is not UNSET:
        keys += 1 + len(body.parameters)
    # An escaped colon in the input would be subtracted without standing in `raw`, so escapes get the second look.
    if b"\\u" not in raw and raw.count(b":") - body.input.count(":") == keys:
        return
    json.loads(raw, object_pairs_hook=_refuse_duplicates)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            field = name[:MAX_NAME_CHARACTERS]
            raise _invalid(field, f"The field `{field}` is there twice.")
        seen.add(name)


def _validation_error(text: str) -> RequestError:
    """Turn msgspec's sentence (`... - at `$.parameters[...]``, or a field's name) into ours with the field named."""
    reason, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".").split("[")[0] or None
    if "unknown field `" in reason:
        field = reason.split("`")[1][:MAX_NAME_CHARACTERS]
        return _invalid(field, f"The field `{field}` is not known.")
    if "missing required field `" in reason:
        field = reason.split("`")[1]
        return _invalid(field, f"The field `{field}` is required.")
    return _invalid(field, reason + (f" in `{field}`." if field else "."))


def _invalid(param: str | None, message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message, param)
