"""A vector as the text of an output: base64 of little-endian float32, the form in which OpenAI's clients ask for it."""

import base64
import struct
from collections.abc import Sequence
from math import isfinite


def write_vector(values: Sequence[float]) -> str:
    """The text. Raises OverflowError for a number that float32 has no room for, ValueError for one that is none, and for no numbers."""
    if not values:
        raise ValueError("not a vector: it is empty.")
    if not all(map(isfinite, values)):
        raise ValueError("not a vector: a value is not finite.")
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")


def read_vector(text: str) -> list[float]:
    """The numbers. Raises ValueError for what is no such text."""
    raw = base64.b64decode(text, validate=True)
    if len(raw) % 4:
        raise ValueError("not a vector: its bytes are no whole number of float32.")
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))
