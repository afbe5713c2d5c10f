"""The fields of OpenAI's bodies that `/v1/completions`, `/v1/chat/completions` and `/v1/embeddings` share.

Fields without effect here are accepted. Fields that would change the output need a capability of the model: they are
passed on to a server that has it, and else rejected by name, since a client that requested three choices and got one
would not notice.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from gateway.api.inference import Integer, Parameters
from gateway.http.request import decode
from gateway.http.validation import invalid
from scheduler.capabilities import ENDPOINT, Capability
from scheduler.errors import ErrorCode, RequestError

MAX_STOPS = 16  # OpenAI's own service accepts four, others more.
MAX_CHOICES = 128  # OpenAI's limit.
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
Stop = str | Annotated[list[str], msgspec.Meta(extra_json_schema={"maxItems": MAX_STOPS})] | None


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream. Others, such as `continuous_usage_stats` of vLLM and SGLang, have no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # Padding that hides the size of tokens. It is ignored.


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The shared fields; null is the same as absent."""

    model: str
    max_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Integer | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    n: Count | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None


OF_SERVERS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos")
"""Sampling fields that OpenAI's API does not have, but most model servers."""

NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
}
"""Values that change nothing, and so need no capability."""

SAMPLING_NEEDS: dict[str, str] = {
    "n": Capability.CHOICES,
    "frequency_penalty": Capability.PENALTIES,
    "presence_penalty": Capability.PENALTIES,
    "logit_bias": Capability.LOGIT_BIAS,
    **dict.fromkeys(OF_SERVERS, ENDPOINT),
}
"""Field -> the capability that it needs, unless its value changes nothing."""

_GATEWAYS = frozenset(
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
        name: value for name, value in members.items() if name not in _GATEWAYS and not _is_absent(name, value, fields)
    }
    for tools, choices in _TOOLS.items():
        if tools not in kept:
            for name in choices:
                kept.pop(name, None)
    return kept


def _is_absent(name: str, value: msgspec.Raw, fields: frozenset[str]) -> bool:
    return bytes(value) == b"null" or (asks_for_nothing(value) and (name in _TOOLS or name not in fields))


def check_repeated(field: str, count: int, repeated: int, max_bytes: int) -> None:
    """Raises RequestError for a list whose other fields, `repeated` bytes with each of its texts, need too much memory."""
    if (count - 1) * repeated > max_bytes:
        message = f"`{field}` has {count} texts, each sent with {repeated} bytes of other fields: send fewer at a time."
        raise RequestError(ErrorCode.REQUEST_TOO_LARGE, message, field)


_PARAMETERS = ("max_tokens", "temperature", "top_p", "seed")


def check_values(body: SamplingFields, accepted: dict[str, tuple[Any, ...]]) -> None:
    """Raises RequestError that names an unsupported field with another value."""
    for name, values in accepted.items():
        if getattr(body, name) not in values:
            raise invalid(name, f"`{name}` with this value is not supported here: leave it out.")


def parameters_of(body: SamplingFields, max_tokens: int | None = None) -> Parameters:
    """The model's parameters that the body has; others have the model's defaults. `max_tokens`: from another field."""
    parameters: Parameters = {name: value for name in _PARAMETERS if (value := getattr(body, name)) is not None}
    if max_tokens is not None:
        parameters["max_tokens"] = max_tokens
    if body.stop:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        if len(stops) > MAX_STOPS:
            raise invalid("stop", f"`stop` must not have more than {MAX_STOPS} texts.")
        parameters["stop"] = list(stops)
    return parameters


def includes_usage(body: SamplingFields) -> bool:
    """Whether the stream ends with its usage. Without a stream `stream_options` have no effect."""
    return bool(body.stream and body.stream_options is not None and body.stream_options.include_usage)
