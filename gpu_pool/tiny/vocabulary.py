"""The token ids of `tiny`: the 256 byte values, then three marks of its own.

There is no tokenizer to ship or to get wrong: a prompt's tokens are its UTF-8 bytes. Free of torch.
"""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterable
from typing import Final

BEGIN: Final = 256
"""Stands before every text, so that an empty prompt has a token to go on from."""
END: Final = 257
"""The model's own mark that a text is finished."""
PAD: Final = 258
"""Fills the shorter rows of a batch; never learned from, never drawn."""
SIZE: Final = 259


def encode(prompt: str, keep: int) -> list[int]:
    """Return BEGIN and the last `keep` bytes of the prompt, cut at a character's start; lone surrogates become `?`."""
    data = prompt.encode("utf-8", errors="replace")
    tail = data[-keep:].lstrip(bytes(range(0x80, 0xC0))) if len(data) > keep else data
    return [BEGIN, *tail]


def decode(tokens: Iterable[int]) -> str:
    """Return the text of byte tokens: bad bytes become U+FFFD, a character cut off at the very end is left out."""
    return decoder().decode(bytes(tokens), final=False)


def decoder() -> IncrementalDecoder:
    """Make what does the same piece by piece: all that `decode(..., final=False)` has returned, together."""
    return getincrementaldecoder("utf-8")("replace")
