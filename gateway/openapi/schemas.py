"""JSON schemas of fields and types."""

from typing import Any

import msgspec

from gateway.http.body.absent_members import NOTHING
from gateway.http.response_headers import Schema

NOT_EMPTY: Schema = {"type": "string", "minLength": 1}


def only(*values: Any) -> Schema:
    """The rule of a field that accepts these values and no others."""
    return {"enum": list(values)}


def with_absent(schema: Any) -> Any:
    """The schema, where each object without other members may have members that ask for nothing."""
    if isinstance(schema, list):
        return [with_absent(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: with_absent(value) for name, value in schema.items()}
    if found.get("additionalProperties") is False:
        found["additionalProperties"] = {"enum": list(NOTHING)}
    return found


def inlined(kind: type, *, optional: tuple[str, ...] = (), **rules: Schema) -> Schema:
    """The schema of a type without references, for a part of a body that is decoded later.

    `optional`: fields that may be absent beside the type's own. `rules`: field -> its schema instead of the type's.
    """
    (schema,), components = msgspec.json.schema_components([kind], ref_template="{name}")

    def resolved(part: Any) -> Any:
        if isinstance(part, list):
            return [resolved(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return resolved(components[part["$ref"]])
        return {name: resolved(value) for name, value in part.items() if name != "discriminator"}

    found: dict[str, Any] = with_absent(resolved(schema))
    found["properties"] |= rules
    found["required"] = [name for name in found["required"] if name not in optional]
    return found
