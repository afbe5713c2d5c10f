"""The prompts of a trace: texts of a given number of tokens, in which what is equal in the trace is equal here.

Prompts are words of three letters and a space, so that a token is a word for the usual tokenizers, four bytes for servers that
count bytes, and a byte where `token_bytes` is 1. A block of a trace is always the same text. The prompts of a session are
beginnings of one text, as a conversation grows. Each prompt ends with a number of its own.
"""

import zlib
from random import Random

from tierlane_tools.traces.replay import ReplayedRequest

BLOCK_TOKENS = 512
"""Of the blocks in Mooncake's traces."""
_TEXT = (
    "the and for are but not you all any can had her was one our out day get has him his how man new now old see two way "
    "who boy did its let put say she too use dad mom car cat dog run sun red big end far few got hot job key law lot map "
)
"""Words of three letters, each with its space."""
_POOL_WORDS = 1 << 17
_WORD_BYTES = 4
_LETTERS = 26
_LABEL_WORDS = 4
_STEP = 40_503
"""Words between the texts of two numbers; odd, so that all places are used."""


class Prompts:
    """Makes prompts; equal seeds make equal texts."""

    def __init__(self, seed: int, token_bytes: int = _WORD_BYTES) -> None:
        words = [_TEXT[at : at + _WORD_BYTES] for at in range(0, len(_TEXT), _WORD_BYTES)]
        self._pool = "".join(Random(f"{seed}/prompts").choices(words, k=_POOL_WORDS)).encode() * 2
        self._token_bytes = token_bytes

    def text(self, request: ReplayedRequest, nonce: bytes) -> bytes:
        """The prompt of a request: ASCII letters, digits and spaces. `nonce`: its number, NONCE_CHARACTERS long."""
        size = request.input_tokens * self._token_bytes
        parts, left, number = list[bytes](), size, _number(nonce)
        for block in request.blocks:
            parts.append(self._of(block, min(left, BLOCK_TOKENS * self._token_bytes)))
            left -= len(parts[-1])
            if left <= 0:
                break
        if left > 0:  # Without blocks, and what they leave.
            parts.append(self._of(_number(request.session.encode()) if request.session else number, left))
        whole = b"".join(parts)
        end = b" " + nonce + b" "
        return whole[: size - len(end)] + end if size > len(end) else nonce[-size:]

    def _of(self, number: int, size: int) -> bytes:
        """The beginning of the text of a number."""
        at = number * _STEP % _POOL_WORDS * _WORD_BYTES
        text = self._pool[at : at + min(size, _POOL_WORDS * _WORD_BYTES)]
        while len(text) < size:
            text += text[: size - len(text)]
        return (_label(number) + text)[:size]


def _number(text: bytes) -> int:
    return zlib.crc32(text)


def _label(number: int) -> bytes:
    """Words by which the texts of two numbers differ from their beginning."""
    letters = bytearray()
    for place in range(3 * _LABEL_WORDS):
        number, letter = divmod(number, _LETTERS)
        letters.append(97 + letter)
        if place % 3 == 2:
            letters += b" "
    return bytes(letters)
