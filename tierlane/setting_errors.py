"""How a bad setting is told: one line that names the variable, what it must be, what it was, and where it was set."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from tierlane.settings.descriptions import variable

MAX_SHOWN_CHARS = 80


class SettingsError(Exception):
    """A setting is missing, unknown, of the wrong type or contradicts another; the message is one line."""


def first_error(error: ValidationError, model: type[BaseModel], origin: Callable[[str], str]) -> str:
    """Return the line for the first fault; `origin` says where a setting was set."""
    fault = error.errors(include_url=False)[0]
    if not fault["loc"]:
        return str(fault["ctx"]["error"])  # A rule between settings, which names its variables itself.
    name = str(fault["loc"][0])
    if fault["type"] == "value_error":
        demand = str(fault["ctx"]["error"])
    else:
        demand = _demand(model.model_json_schema()["properties"][name]) or fault["msg"]
    # URLs and tokens are marked as not for showing, since they may hold passwords.
    got = _got(fault["input"]) if model.model_fields[name].repr else ""
    return f"{variable(name)}: {demand}{got}{origin(name)}"


def unknown_name(name: str, similar: Sequence[str]) -> str:
    """Return the line for a name that is no setting, with the nearest known one."""
    return f"{name}: is not a setting of Tierlane" + (f"; did you mean {similar[0]}?" if similar else "")


def _demand(schema: Mapping[str, Any]) -> str:
    schema = schema.get("anyOf", [schema])[0]  # An optional setting is written as "this type or null".
    match schema:
        case {"type": "integer" | "number" as kind, "minimum": least, "maximum": most}:
            return f"must be {'an' if kind == 'integer' else 'a'} {kind} from {least} to {most}"
        case {"type": "boolean"}:
            return "must be true or false"
        case {"enum": choices}:
            return f"must be one of {', '.join(choices)}"
        case {"pattern": pattern}:
            return f"must match {pattern}"
        case {"minLength": 1}:
            return "must not be empty"
    return ""


def _got(value: object) -> str:
    shown = repr(value)
    return f", got {shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + '...'}"
