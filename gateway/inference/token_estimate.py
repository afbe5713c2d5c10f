"""The tokens that a request is charged until its usage is known."""

import math
from collections.abc import Mapping
from typing import Any

from gateway.api.format import DocumentForm
from scheduler.payload import DOCUMENTS, Payload
from scheduler.token_estimates import estimate

DEFAULT_OUTPUT_TOKENS = 16
MOST_OUTPUT_TOKENS = 2**31  # Larger values would lose digits in a bucket that is stored as a float.
_OUTPUT_FIELDS = ("max_tokens", "max_new_tokens")


def token_estimate(payload: Payload, input_bytes: int, document: DocumentForm | None = None) -> int:
    """Tokens charged until the usage is known: a quarter of the input's bytes, plus the maximum output of each choice."""
    if document is None or payload.task not in DOCUMENTS:
        return estimate(input_bytes) + (
            _output_tokens(payload.parameters) if payload.parameters else DEFAULT_OUTPUT_TOKENS
        )
    return input_tokens(payload, input_bytes, document) + _output_tokens(payload.parameters) * document.choices


def input_tokens(payload: Payload, input_bytes: int, document: DocumentForm | None = None) -> int:
    """The part of the estimate for the input."""
    read = estimate(input_bytes)
    return read if document is None or payload.task not in DOCUMENTS else max(1, read + document.tokens)


def _output_tokens(parameters: Mapping[str, Any]) -> int:
    for name in _OUTPUT_FIELDS:
        wanted = parameters.get(name)
        # 500.0 is an integer in JSON, and servers accept "500"; `type` excludes True, which is an int in Python.
        if type(wanted) is str and wanted.isascii() and wanted.isdigit():
            wanted = float(wanted)
        if type(wanted) is int or type(wanted) is float:
            return math.ceil(min(max(0, wanted), MOST_OUTPUT_TOKENS))
    return DEFAULT_OUTPUT_TOKENS
