"""Vectors as text: base64 of little-endian float32, the format that OpenAI's clients request."""

import base64
import struct
from collections.abc import Sequence
from math import isfinite


def write_vector(values: Sequence[float]) -> str:
    """Encode a vector. Raises OverflowError for a number outside float32, ValueError for no, infinite or NaN numbers."""
    if not values:
        raise ValueError("not a vector: it is empty.")
    if not all(map(isfinite, values)):
        raise ValueError("not a vector: a value is not finite.")
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")


def read_vector(text: str) -> list[float]:
    """Decode a vector. Raises ValueError if the text is not a vector."""
    raw = base64.b64decode(text, validate=True)
    if len(raw) % 4:
        raise ValueError("not a vector: its length is not a multiple of 4 bytes.")
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))
