"""Members of a body that are for the model's server.

Fields that would change the output need a capability of the model: they are passed on to a server that has it, and else
rejected by name, since a client that requested three choices and got one would not notice.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.http.body.strict_json import decode
from scheduler.capabilities import Capability
from scheduler.errors import ErrorCode, RequestError

_GATEWAY_FIELDS = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "service_tier",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "metadata",
        "store",
    }
)
"""Fields that are not passed on: the gateway's own, and those about the client."""

_TOOLS = {"tools": ("tool_choice", "parallel_tool_calls"), "functions": ("function_call",)}
"""Field with tools -> those that have an effect only with it."""
_NOTHING = (b"null", b"[]", b"{}")

RawMembers = Mapping[str, msgspec.Raw]
Body = TypeVar("Body")
members_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""The members of a body as they are written."""


def decode_extended(strict: "msgspec.json.Decoder[Body]", extended: "msgspec.json.Decoder[Body]", raw: bytes) -> Body:
    """Decode a body. One with unknown fields has the type of `extended`. Raises RequestError that names the field."""
    try:
        return decode(strict, raw)
    except RequestError as error:
        try:
            return decode(extended, raw)
        except RequestError as other:
            raise (error if other.param is None else other) from None


def needs_of(
    body: Any,
    members: RawMembers,
    fields: frozenset[str],
    needs: Mapping[str, str],
    no_effect: Mapping[str, tuple[Any, ...]],
) -> dict[str, str]:
    """The capabilities that a body needs, each with its first field; `members`: the fields that may be unknown."""
    found: dict[str, str] = {}
    for name, capability in needs.items():
        value = getattr(body, name)
        if value is not None and value not in no_effect.get(name, ()):
            found.setdefault(capability, name)
    unknown = next((name for name in members if name not in fields and not asks_for_nothing(members[name])), None)
    if unknown is not None:
        found[Capability.EXTENSIONS] = unknown
    return found


def asks_for_nothing(value: msgspec.Raw) -> bool:
    """Whether a member is null, an empty list or an empty object."""
    return bytes(value) in _NOTHING


def passed_on_members(members: RawMembers, fields: frozenset[str]) -> dict[str, msgspec.Raw]:
    """The members of a body that are for the model's server, without those that ask for nothing: vLLM rejects an empty list of
    tools, and a choice of tools without any.
    """
    kept = {
        name: value
        for name, value in members.items()
        if name not in _GATEWAY_FIELDS
        and bytes(value) != b"null"
        and not (asks_for_nothing(value) and (name in _TOOLS or name not in fields))
    }
    for tools, choices in _TOOLS.items():
        if tools not in kept:
            for name in choices:
                kept.pop(name, None)
    return kept


def check_repeated(field: str, count: int, repeated: int, max_bytes: int) -> None:
    """Raises RequestError for a list whose other fields, `repeated` bytes with each of its texts, need too much memory."""
    if (count - 1) * repeated > max_bytes:
        message = f"`{field}` has {count} texts, each sent with {repeated} bytes of other fields: send fewer at a time."
        raise RequestError(ErrorCode.REQUEST_TOO_LARGE, message, field)
