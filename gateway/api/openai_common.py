"""The fields of OpenAI's bodies that `/v1/completions` and `/v1/chat/completions` share.

Fields without effect here are accepted. Fields that would change the text and are not supported are rejected by name,
since a client that requested three choices and got one would not notice.
"""

from typing import Annotated, Any

import msgspec

from gateway.api.inference import Integer, Parameters
from gateway.http.validation import invalid

MAX_STOPS = 4  # OpenAI's limit.
Stop = str | Annotated[list[str], msgspec.Meta(extra_json_schema={"maxItems": MAX_STOPS})] | None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Options of a stream."""

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
    n: Integer | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


ACCEPTED_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
}
"""Unsupported fields -> the values that are accepted, because they have no effect."""

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
    """Whether the stream ends with its usage. Raises RequestError for `stream_options` without `stream`."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise invalid("stream_options", "`stream_options` requires `stream: true`.")
    return bool(body.stream_options.include_usage)
