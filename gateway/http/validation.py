"""What is wrong with a body, in words: msgspec's messages as sentences that name the field, the fault and the remedy."""

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from msgspec import inspect

from scheduler.errors import ErrorCode, RequestError

MAX_NAME_CHARACTERS = 64  # Of a parameter's name, and of a field's name in an error message.
MAX_PATH_CHARACTERS = 120
MOST_LISTED = 12

PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*(?![\s\S])"
"""Text without control characters: PostgreSQL does not store NUL, and constraints of the tables reject the others. `$`
would accept a line feed at the end.
"""

_TYPES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "array": "an array",
    "object": "an object",
}
_WRONG_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_LENGTH = re.compile(r"Expected `(\w+)` of length (<=|>=) (\d+)")
_BOUND = re.compile(r"Expected `\w+` (<=|>=|<|>) (-?\d+(?:\.\d+)?)")
_STEPS = re.compile(r"\[[^]]*\]|[^.[]+")
_NOT_LISTED = "is not one of the values that /docs lists"
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "greater than"}
_UNITS = {"str": "characters", "array": "items", "object": "members"}

_JOB = "send it to POST /v1/inference with the header `Prefer: respond-async`"
_HEADER = "it is a header of the request, not a field of the body"
_PARAMETER = 'put it into `parameters`, as in {"input": "...", "parameters": {"max_tokens": 16}}'
_PARAMETERS = dict.fromkeys(("max_tokens", "temperature", "top_p", "seed", "stop"), _PARAMETER)
_STREAMS = 'other paths stream, such as /v1/chat/completions: send `"stream": true` there'
_ELSEWHERE = {
    "stream": _STREAMS,
    "stream_options": _STREAMS,
    "callback_url": f"it belongs to a job: {_JOB}",
    "prefer": f"{_HEADER}: {_JOB}",
    "respond_async": f"{_HEADER}: {_JOB}",
    "async": f"for a job, {_JOB.replace('send it', 'send the request')}",
    "idempotency_key": f"{_HEADER}: `Idempotency-Key`",
    "authorization": f"{_HEADER}: `Authorization: Bearer <key>`",
    "api_key": f"{_HEADER}: `Authorization: Bearer <key>`",
    "messages": "it belongs to /v1/chat/completions and /v1/messages",
    "input": "it belongs to /v1/inference and /v1/embeddings",
    "prompt": "it belongs to /v1/completions",
    "tier": "the tier follows from the API key",
    "priority": "the priority follows from the tier of the API key; only a job may ask for another",
}
"""Fields that clients send to the wrong place -> where they belong."""


def invalid(param: str | None, message: str) -> RequestError:
    """The error for an invalid body."""
    return RequestError(ErrorCode.INVALID_REQUEST, message, param)


def validation_error(text: str, fields: Collection[str] = (), kind: Any = None) -> RequestError:
    """The error for a message of msgspec, which has the path or the name of the field.

    `fields`: those of the body, `kind`: its type. `param` is the field of the body; the message has the whole path.
    """
    reason, _, path = text.partition(" - at `")
    path = path.rstrip("`")
    where = path.removeprefix("key in ").removeprefix("$").lstrip(".")[:MAX_PATH_CHARACTERS]
    top = where.split(".")[0].split("[")[0] or None
    if "unknown field `" in reason:
        name = reason.split("`")[1]
        return invalid(name[:MAX_NAME_CHARACTERS], _unknown(name, where, fields))
    if "missing required field `" in reason:
        name = reason.split("`")[1]
        return invalid(name, f"The field `{name}` is required{f' in `{where}`' if where else ''}.")
    if not where:
        subject = "The body"
    elif path.startswith("key in "):
        subject = f"A name in `{where}`"
    else:  # The keys of an object and the positions of nested arrays are not in the path.
        subject = f"A value in `{where.partition('[...]')[0]}`" if "[...]" in where else f"`{where}`"
    if reason.startswith(("Invalid enum value", "Invalid value")):  # The value may be long or private.
        names = [f"`{value}`" for value in _values_at(kind, where)]
        known = (
            f"must be {'one of ' if names[1:] else ''}{', '.join(names)}"
            if 0 < len(names) <= MOST_LISTED
            else _NOT_LISTED
        )
        return invalid(top, f"{subject} {known}.")
    return invalid(top, f"{subject} {_fault(reason)}.")


def _values_at(kind: Any, where: str) -> list[str]:
    """The texts that a type accepts at a path such as `messages[0].role`: those of Literals, and the tags of structs."""
    kinds = list(_alternatives(_type_info(kind)))
    values: list[str] = []
    for step in _STEPS.findall(where):
        below: list[inspect.Type] = []
        values = []
        for each in kinds:
            match each:
                case inspect.StructType():
                    below += [field.type for field in each.fields if field.encode_name == step]
                    values += [str(each.tag)] if each.tag_field == step else []
                case inspect.ListType(item_type=item) | inspect.DictType(value_type=item) if step.startswith("["):
                    below.append(item)
        kinds = [alternative for each in below for alternative in _alternatives(each)]
    values += [str(value) for each in kinds if isinstance(each, inspect.LiteralType) for value in each.values]
    return list(dict.fromkeys(values))


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    match kind:
        case inspect.UnionType(types):
            for each in types:
                yield from _alternatives(each)
        case inspect.Metadata(type=inner):
            yield from _alternatives(inner)
        case _:
            yield kind


@lru_cache(maxsize=64)
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _fault(reason: str) -> str:
    if "matching regex" in reason:  # All patterns exclude control characters.
        return "must have no control characters"
    if (found := _WRONG_TYPE.match(reason)) is not None:
        expected, got = found.groups()
        fraction = got == "float" and "int" in expected
        return f"must be {_types(expected)}, not {'a number with a fraction' if fraction else _types(got)}"
    if (found := _LENGTH.match(reason)) is not None:
        kind, sign, count = found.groups()
        size = f"have {_BOUNDS[sign]} {count} {_UNITS.get(kind, 'items')}"
        return f"must {'not be empty' if (sign, count) == ('>=', '1') else size}"
    if (found := _BOUND.match(reason)) is not None:
        return f"must be {_BOUNDS[found[1]]} {found[2]}"
    return f"is not valid: {reason[:1].lower()}{reason[1:]}"


def _types(names: str) -> str:
    """`str | null` as "a string or null". A client that sends an integer for a number made no mistake, so it is not named."""
    kinds = [name.strip() for name in names.split("|")]
    if "int" in kinds and "float" in kinds:
        kinds.remove("int")
    *first, last = [_TYPES.get(kind, kind) for kind in kinds]
    return f"{', '.join(first)} or {last}" if first else last


def unknown_field(name: str, fields: Collection[str]) -> RequestError:
    """The error for a field of a body that only has `fields`."""
    return invalid(name[:MAX_NAME_CHARACTERS], _unknown(name, "", fields))


def _unknown(name: str, where: str, fields: Collection[str]) -> str:
    shown = name[:MAX_NAME_CHARACTERS]
    if where:
        return f"The field `{shown}` is not known in `{where}`: leave it out."
    if "parameters" in fields and name in _PARAMETERS:
        return f"The field `{shown}` is not known here: {_PARAMETER}."
    hint = _ELSEWHERE.get(name.lower().replace("-", "_"))
    if hint is None and (close := get_close_matches(shown, fields, 1)):
        hint = f"did you mean `{close[0]}`?"
    listed = ", ".join(f"`{field}`" for field in fields) if len(fields) <= MOST_LISTED else ""
    known = f" The fields are: {listed}." if listed else ""
    sentence = f"The field `{shown}` is not known here"
    if hint is None:
        return f"{sentence}: leave it out.{known}"
    return f"{sentence}: {hint}{'' if hint.endswith('?') else '.'}{known}"
