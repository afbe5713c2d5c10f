"""JSON bodies, decoded and checked in one step by their type; errors name the field.

msgspec rejects unknown fields, wrong types, NaN, invalid UTF-8 and (by the types) deep nesting, but keeps the last of two
equal keys, so that decoders check for duplicates too.
"""

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from gateway.http.body.absent_members import without_absent_member
from gateway.http.validation import MAX_NAME_CHARACTERS, invalid, validation_error
from scheduler.errors import RequestError

T = TypeVar("T")
MOST_ABSENT = 16
"""Each costs a pass over the body."""
_FLOAT_FOR_INT = re.compile(r"Expected `int\b[^`]*`, got `float`")
_NOT_A_NUMBER = object()  # The parsed value of NaN and Infinity, by which their field is found.
TOO_DEEP = "The body is nested too deeply."


def decode(decoder: "msgspec.json.Decoder[T]", raw: bytes, absent: int = MOST_ABSENT) -> T:
    """The decoded body. Raises RequestError `invalid_request`, with `param`. Duplicate keys are not detected.

    `absent`: the maximum number of unknown members that are removed because their values request nothing.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if _FLOAT_FOR_INT.search(str(error)):
            return _decode_whole_floats(decoder, raw)
        if absent and (shorter := without_absent_member(raw, str(error))) is not None:
            return decode(decoder, shorter, absent - 1)
        raise validation_error(str(error), fields_of(decoder), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _not_json(raw) from None


def fields_of(decoder: "msgspec.json.Decoder[Any]") -> tuple[str, ...]:
    """The fields of the body."""
    return tuple(getattr(decoder.type, "__struct_encode_fields__", ()))


def _decode_whole_floats(decoder: "msgspec.json.Decoder[T]", raw: bytes) -> T:
    """Decode again, with 16.0 as 16: JSON Schema, and the encoders of some languages, do not distinguish them."""
    try:
        plain = json.loads(raw, parse_float=_integer_if_whole, parse_constant=_reject_constant)
        return decoder.decode(msgspec.json.encode(plain))
    except msgspec.ValidationError as error:
        raise validation_error(str(error), fields_of(decoder), decoder.type) from None
    except (ValueError, RecursionError):  # The rest of the body is not JSON.
        raise _not_json(raw) from None


def _integer_if_whole(digits: str) -> int | float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("out of range")
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def _reject_constant(_: str) -> None:
    raise ValueError("NaN or Infinity")


def check_duplicates(raw: bytes) -> None:
    """Parse a valid body again. Raises RequestError that names a duplicate key."""
    try:
        json.loads(raw, object_pairs_hook=_reject_duplicates)
    except RecursionError:  # The library that decoded it allows a few levels more.
        raise invalid(None, TOO_DEEP) from None
    except UnicodeDecodeError:  # In a field that it skipped.
        raise _not_json(raw) from None


def _not_json(raw: bytes) -> RequestError:
    """The error for a body that is not JSON. It names the field of a NaN, which many encoders write."""
    try:
        json.loads(raw, object_pairs_hook=_reject_not_a_number, parse_constant=lambda _: _NOT_A_NUMBER)
    except RequestError as error:
        return error
    except json.JSONDecodeError as error:
        if not raw.strip():
            return invalid(None, "The body is empty: send a JSON object.")
        fault = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        where = f"line {error.lineno}, column {error.colno}"
        return invalid(None, f"The body is not valid JSON: {fault} ({where}).")
    except (ValueError, RecursionError):
        pass
    return invalid(None, "The body is not valid JSON in UTF-8.")


def _reject_not_a_number(pairs: list[tuple[str, Any]]) -> None:
    for name, value in pairs:
        if value is _NOT_A_NUMBER or (isinstance(value, list) and _NOT_A_NUMBER in value):
            field = name[:MAX_NAME_CHARACTERS]
            raise invalid(field, f"`{field}` is NaN or infinite, which JSON does not allow.")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            field = name[:MAX_NAME_CHARACTERS]
            raise invalid(field, f"The field `{field}` occurs twice.")
        seen.add(name)
