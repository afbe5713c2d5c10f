"""Large strings of a JSON body, replaced by marks before the body is parsed.

A body is parsed several times, each of which takes half a millisecond for an image of 2 MB. So a mark replaces each large
string, which is checked once and not copied. A mark is a word that no client can know.

The search needs no parser. A run without a quotation mark is a string, or lies between two strings. In the second case its
mark is outside of strings, where a word is no JSON, and the caller parses the whole body.
"""

import secrets
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

MIN_LARGE = 32_768
"""Bytes. Strings of twice this size are always found."""

LargeStrings = Mapping[str, memoryview]
"""Mark -> the string as it is written, without its quotation marks."""

NO_STRINGS: LargeStrings = MappingProxyType({})
_WORD = f"large-{secrets.token_hex(16)}-"
_string = msgspec.json.Decoder(str)


def without_large_strings(raw: bytes) -> tuple[bytes, LargeStrings]:
    """The body with marks instead of large strings. Keys, and strings with escapes, are left in it."""
    found: dict[str, memoryview] = {}
    view, kept, at, after = memoryview(raw), list[bytes](), MIN_LARGE, 0
    while (end := raw.find(b'"', at)) >= 0:
        if end - at >= MIN_LARGE:
            begin = raw.rfind(b'"', after + 1, at) + 1
            is_value = raw[end + 1 : end + 9].lstrip()[:1] in (b",", b"}", b"]")
            if begin and is_value and raw.find(b"\\", begin, end) < 0 and _is_string(view[begin - 1 : end + 1]):
                mark = f"{_WORD}{len(found)}."
                found[mark] = view[begin:end]
                kept += [raw[after:begin], mark.encode()]
                after = end
        at = end + MIN_LARGE
    return (b"".join([*kept, raw[after:]]) if found else raw), found


def _is_string(quoted: memoryview) -> bool:
    try:
        _string.decode(quoted)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def with_large_strings(short: bytes, strings: LargeStrings) -> list[bytes | memoryview]:
    """The parts of a body with its large strings, whose marks are in their order."""
    parts: list[bytes | memoryview] = []
    for mark, text in strings.items():
        before, _, short = short.partition(mark.encode())
        parts += [before, text]
    return [*parts, short]
