"""Shared parts of text backends: parameters, prompts, and preparation of items.

Without torch. An item that cannot be prepared fails alone. A prompt is a text, or a conversation in the model's
template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from gpu_pool.backends.backend import Item, ItemResult
from scheduler.errors import ErrorCode
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, decode_messages

KNOWN: Final = "temperature, top_p, max_tokens, seed, stop"
MAX_TEMPERATURE: Final = 2.0
MAX_TOKENS: Final = 256
MAX_STOPS: Final = 4
MAX_STOP_BYTES: Final = 64
SEED_BITS: Final = 63

Template = Callable[[Sequence[PromptMessage]], str]


class ParameterError(ValueError):
    """A generation parameter is unknown, of the wrong type or out of range; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True)
class GenerationParameters:
    """How one row is continued. Not validated here: external values come through `parse_parameters`.

    `temperature` 0 takes the likeliest token, up to 2 samples more freely; `top_p` (0, 1] samples only from the
    likeliest tokens that together have this probability; `max_tokens` limits the new tokens (for `tiny`, bytes); a
    `seed` makes sampling repeatable; the text ends before the first of the `stop` strings.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 48
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """One row's continuation.

    `tokens_in` counts the prompt tokens that were read, `tokens_out` the new ones, including those of a stop string
    that was cut off. `finish_reason` is `length` if `max_tokens` ended it, else `stop`.
    """

    text: str
    tokens_in: int
    tokens_out: int
    finish_reason: Literal["stop", "length"]


def parse_parameters(raw: dict[str, object], most_tokens: int = MAX_TOKENS) -> GenerationParameters:
    """The parameters in `raw`, with defaults; `most_tokens` is the largest `max_tokens`.

    Raises `ParameterError` for a field that is unknown, of the wrong type or out of range.
    """
    known: dict[str, Any] = {}
    for field, value in raw.items():
        if field == "temperature":
            known[field] = _parse_number(field, value)
            if not 0.0 <= known[field] <= MAX_TEMPERATURE:
                raise ParameterError(field, f"must be from 0 to {MAX_TEMPERATURE:g}")
        elif field == "top_p":
            known[field] = _parse_number(field, value)
            if not 0.0 < known[field] <= 1.0:
                raise ParameterError(field, "must be above 0 and at most 1")
        elif field == "max_tokens":
            known[field] = _parse_integer(field, value)
        elif field == "seed":
            known[field] = None if value is None else _parse_integer(field, value)
            if not -(2**SEED_BITS) <= (known[field] or 0) < 2**SEED_BITS:
                raise ParameterError(field, "must fit a signed 64-bit integer")
        elif field == "stop":
            known[field] = _parse_stop(field, value)
        else:
            raise ParameterError(field, f"is not a parameter of this model; it knows {KNOWN}")
    if not 1 <= known.get("max_tokens", 1) <= most_tokens:
        raise ParameterError("max_tokens", f"must be from 1 to {most_tokens}")
    return GenerationParameters(**known)


def _parse_stop(field: str, value: object) -> tuple[str, ...]:
    """Accept one string or a list of them, as the OpenAI API does."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)):
        raise ParameterError(field, "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ParameterError(field, f"must hold at most {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str):
            raise ParameterError(field, "must be a string or a list of strings")
        if not 1 <= len(stop.encode("utf-8", errors="replace")) <= MAX_STOP_BYTES:
            raise ParameterError(field, f"each string must be 1 to {MAX_STOP_BYTES} bytes long")
    return tuple(stops)


def _parse_number(field: str, value: object) -> float:
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterError(field, "must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(field, "must be a finite number")
    return value if isinstance(value, float) else float(max(-1, min(value, 3)))


def _parse_integer(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(field, "must be an integer")
    return value


def read_parameters(item: Item, most_tokens: int = MAX_TOKENS) -> GenerationParameters | ItemResult:
    """The generation parameters of the item, or a rejection that names the field."""
    try:
        return parse_parameters(item.parameters, most_tokens)
    except ParameterError as error:
        return ItemResult(f"parameters.{error.field} {error.message}.", 0, ErrorCode.INVALID_REQUEST)


def prompt_of(item: Item, template: Template) -> str:
    """The text for the model. Raises ValueError for a malformed conversation."""
    return template(decode_messages(item.input)) if item.task is Task.CHAT else item.input


def named_turns(messages: Sequence[PromptMessage]) -> str:
    """For models without a template: one line for each message with its role, then the assistant's role."""
    return "".join(f"{message.role}: {message.content}\n" for message in messages) + "assistant:"


def running_text(messages: Sequence[PromptMessage]) -> str:
    """For models that only continue text: the messages, one a line."""
    return "\n".join(message.content for message in messages)


def last_turn(messages: Sequence[PromptMessage]) -> str:
    """For models that use the last message only."""
    return messages[-1].content
