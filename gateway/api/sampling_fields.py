"""The fields of OpenAI's bodies that `/v1/completions` and `/v1/chat/completions` share.

Fields without effect here are accepted.
"""

from typing import Annotated, Any

import msgspec

from gateway.api.inference import Integer, Parameters
from gateway.http.validation import invalid
from scheduler.capabilities import ENDPOINT, Capability

MAX_STOPS = 16  # OpenAI's own service accepts four, others more.
MAX_CHOICES = 128  # OpenAI's limit.
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
Stop = str | Annotated[list[str], msgspec.Meta(extra_json_schema={"maxItems": MAX_STOPS})] | None

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

_PARAMETERS = ("max_tokens", "temperature", "top_p", "seed")


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
