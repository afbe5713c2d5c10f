"""BYTES tensors in binary form: each element is its length, as 4 little-endian bytes, and its bytes."""

from collections.abc import Sequence

from gateway.api.open_inference.tensors import MAX_ELEMENTS, TEXT_INPUT
from gateway.http.validation import invalid

LENGTH_BYTES = 4


def unpacked(data: bytes) -> list[bytes]:
    """The elements of a BYTES tensor in binary form. Raises RequestError if a length does not fit."""
    elements: list[bytes] = []
    at = 0
    while at < len(data) and len(elements) <= MAX_ELEMENTS:
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(data[at:start], "little")
        if start > len(data) or at > len(data):
            raise invalid("inputs", f"The binary data of `{TEXT_INPUT}` ends within an element.")
        elements.append(data[start:at])
    return elements


def packed(texts: Sequence[str]) -> bytes:
    """A BYTES tensor in binary form."""
    parts: list[bytes] = []
    for text in texts:
        data = text.encode()
        parts += (len(data).to_bytes(LENGTH_BYTES, "little"), data)
    return b"".join(parts)
