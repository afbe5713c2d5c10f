"""The capabilities of a model beyond text."""

from enum import StrEnum

ENDPOINT = "endpoint"
"""Needed by fields without a capability of their own, such as `suffix`: every model with a server behind it has it."""


class Capability(StrEnum):
    """A capability of a model beyond text, by the name in a row of `models` and in error messages."""

    TOOLS = "tools"
    STRUCTURED_OUTPUT = "structured_output"
    LOGPROBS = "logprobs"
    CHOICES = "choices"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"
    REASONING = "reasoning"
    IMAGES = "images"
    AUDIO = "audio"
    FILES = "files"
    DIMENSIONS = "dimensions"
    EXTENSIONS = "extensions"


PASSED_ON = frozenset(Capability) - {Capability.EXTENSIONS}
"""Capabilities of a backend that passes requests on. Unknown fields must be allowed by the row of the model."""


def capabilities(row: frozenset[str] | None, *, passes_on: bool) -> frozenset[str]:
    """The capabilities of a model: none without a server behind it; else those of its row, by default all."""
    if not passes_on:
        return frozenset()
    return (PASSED_ON if row is None else row) | {ENDPOINT}
