"""The result that a Python model may return for an input, instead of a plain text or vector.

A model imports it from here; nothing else of the package is imported with it.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple


class ModelOutput(NamedTuple):
    """One output with what the model knows about it; every field has a default.

    `output`: the text, or the vector of `embed`. `input_tokens` and `output_tokens` are counts, 0 if unknown; their sum is
    charged. `finish_reason`: `length` if a limit ended the text. `error`: why the model rejects the request, for its client,
    which gets 400 `invalid_request`; it begins with `parameters.<name>` if a parameter is wrong.
    """

    output: str | Sequence[float] = ""
    input_tokens: int = 0
    output_tokens: int = 0
    finish_reason: Literal["stop", "length"] = "stop"
    error: str = ""
