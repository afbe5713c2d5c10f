"""A customer's body, decoded and checked in one step by its type, with the field at fault named.

msgspec refuses unknown fields, wrong types, NaN, bad UTF-8 and (by the types) deep nesting. It lets the last of two
equal keys win, which would let one body mean two things to two readers: who decodes looks for duplicates besides.
"""

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from scheduler.errors import ErrorCode, RequestError

MAX_NAME_CHARACTERS = 64  # Of a parameter's name, and of a field's name that is told back.

T = TypeVar("T")
_NOT_WHOLE = re.compile(r"Expected `int\b[^`]*`, got `float`")
_NO_NUMBER = object()  # Stands for NaN and Infinity while their field is looked for.


def decode(decoder: "msgspec.json.Decoder[T]", raw: bytes) -> T:
    """What a body says. Raises RequestError `invalid_request`, with `param`; duplicate keys are not looked for."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if _NOT_WHOLE.search(str(error)):
            return _decode_whole(decoder, raw)
        raise _validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _not_json(raw) from None


def _decode_whole(decoder: "msgspec.json.Decoder[T]", raw: bytes) -> T:
    """Once more, with 16.0 read as 16: they are one number to JSON Schema, and to the encoders of some languages."""
    try:
        plain = json.loads(raw, parse_float=_whole, parse_constant=_refuse_constant)
        return decoder.decode(msgspec.json.encode(plain))
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except (ValueError, RecursionError):  # What follows is not JSON at all.
        raise _not_json(raw) from None


def _whole(digits: str) -> int | float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("out of range")
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def _refuse_constant(_: str) -> None:
    raise ValueError("NaN or Infinity")


def check_duplicates(raw: bytes) -> None:
    """Parse a body that is valid once more. Raises RequestError that names a key that is there twice."""
    json.loads(raw, object_pairs_hook=_refuse_duplicates)


def check_text(name: str, text: str, max_bytes: int) -> None:
    """Raises RequestError for an input that is empty or too large."""
    if not text:
        raise invalid(name, f"`{name}` must not be empty.")
    # A character has one to four bytes, so most texts need no encoding to be judged.
    if len(text) * 4 > max_bytes and len(text.encode()) > max_bytes:
        message = f"`{name}` must not be larger than {max_bytes} bytes."
        raise RequestError(ErrorCode.REQUEST_TOO_LARGE, message, name)


def invalid(param: str | None, message: str) -> RequestError:
    """The error for a body that is not valid."""
    return RequestError(ErrorCode.INVALID_REQUEST, message, param)


def _not_json(raw: bytes) -> RequestError:
    """The error for a body that is not JSON: with its field where a NaN is at fault, since many encoders write it."""
    try:
        json.loads(raw, object_pairs_hook=_refuse_no_number, parse_constant=lambda _: _NO_NUMBER)
    except RequestError as error:
        return error
    except (ValueError, RecursionError):
        pass
    return invalid(None, "The body is not valid JSON in UTF-8.")


def _refuse_no_number(pairs: list[tuple[str, Any]]) -> None:
    for name, value in pairs:
        if value is _NO_NUMBER or (isinstance(value, list) and _NO_NUMBER in value):
            field = name[:MAX_NAME_CHARACTERS]
            raise invalid(field, f"`{field}` is NaN or infinite, which JSON has no word for.")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            field = name[:MAX_NAME_CHARACTERS]
            raise invalid(field, f"The field `{field}` is there twice.")
        seen.add(name)


def _validation_error(text: str) -> RequestError:
    """Turn msgspec's sentence (`... - at `$.parameters[...]``, or a field's name) into ours with the field named."""
    reason, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".").split("[")[0] or None
    if "unknown field `" in reason:
        field = reason.split("`")[1][:MAX_NAME_CHARACTERS]
        return invalid(field, f"The field `{field}` is not known.")
    if "missing required field `" in reason:
        field = reason.split("`")[1]
        return invalid(field, f"The field `{field}` is required.")
    if "matching regex" in reason:  # All patterns are of this kind.
        return invalid(field, f"`{field}` must have no control characters.")
    return invalid(field, reason + (f" in `{field}`." if field else "."))
