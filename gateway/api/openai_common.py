"""The fields of OpenAI's bodies that say how text is made, as `/v1/completions` and `/v1/chat/completions` share them.

Fields that change nothing here are taken and left alone; those that would change the text and cannot be obeyed are
refused by name, since a client that asked for three choices and got one would not notice.
"""

from typing import Annotated, Any

import msgspec

from gateway.api.inference import Integer, Parameters, Scalar
from gateway.http.request import invalid

MAX_STOPS = 4  # As OpenAI has it.
Stop = str | Annotated[list[str], msgspec.Meta(extra_json_schema={"maxItems": MAX_STOPS})] | None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How a stream is to be."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # Padding against eavesdroppers who count bytes; there is none here.


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What both have; None is the same as absent."""

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


# What may be said, since it is what happens anyway.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
}
_PARAMETERS = ("max_tokens", "temperature", "top_p", "seed")


def check_harmless(body: SamplingFields, harmless: dict[str, tuple[Any, ...]]) -> None:
    """Raises RequestError that names a field which cannot be obeyed."""
    for name, values in harmless.items():
        if getattr(body, name) not in values:
            raise invalid(name, f"`{name}` with this value is not supported here: leave it out.")


def parameters_of(body: SamplingFields, max_tokens: int | None = None) -> Parameters:
    """Those that were said: what a model does without them is its own. `max_tokens`: by another name of it."""
    parameters: Parameters = {name: value for name in _PARAMETERS if (value := getattr(body, name)) is not None}
    if max_tokens is not None:
        parameters["max_tokens"] = max_tokens
    if body.stop:
        parameters["stop"] = [body.stop] if isinstance(body.stop, str) else _few(body.stop)
    return parameters


def includes_usage(body: SamplingFields) -> bool:
    """Whether the stream ends with its usage. Raises RequestError where there is no stream to say this of."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise invalid("stream_options", "`stream_options` may be there only with `stream: true`.")
    return bool(body.stream_options.include_usage)


def _few(stops: list[str]) -> list[Scalar]:
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"`stop` must not hold more than {MAX_STOPS} texts.")
    return list(stops)
