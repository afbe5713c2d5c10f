"""Tokens where nothing has counted them: a quarter of the bytes of the texts, at admission and for what was delivered.

Of JSON only the texts count, not the members around them, nor images and other data.
"""

from typing import Any

import msgspec

BYTES_PER_TOKEN = 4
_TEXTS = frozenset(
    {"content", "text", "prompt", "reasoning", "reasoning_content", "refusal", "arguments", "name", "description"}
)
_lines = msgspec.json.Decoder()


def estimate(size: int) -> int:
    """Tokens of so many bytes of text."""
    return -(-size // BYTES_PER_TOKEN)


def document_tokens(document: bytes) -> int:
    """An estimate for the texts in JSON; 0 for junk."""
    try:
        return estimate(_text_bytes(msgspec.json.decode(document)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0


def line_tokens(lines: str) -> int:
    """An estimate for the texts in the complete ones of the lines of an output (see chat_document.py); 0 for junk."""
    try:
        return estimate(sum(map(_text_bytes, _lines.decode_lines(lines[: lines.rfind("\n") + 1]))))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0


def _text_bytes(value: Any, *, counts: bool = False) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace")) if counts else 0
    if isinstance(value, int):  # An id of a token.
        return BYTES_PER_TOKEN if counts else 0
    if isinstance(value, list):
        return sum(_text_bytes(each, counts=counts) for each in value)
    if isinstance(value, dict):
        return sum(_text_bytes(each, counts=name in _TEXTS) for name, each in value.items())
    return 0
