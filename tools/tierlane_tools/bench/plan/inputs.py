"""The inputs of a run.

An input is NONCE + filler. The nonce is unique, so that an answer to another request cannot pass for this one, and
begins with letters drawn for each run, so that no cache of an earlier run answers.
"""

import json
from itertools import cycle, islice

from tierlane_tools.bench.command import MIN_INPUT_BYTES

TAG_CHARACTERS = 6
NONCE_CHARACTERS = TAG_CHARACTERS + 8  # The number in hex: 4 billion requests a run.
_FILLER = "the quick brown fox jumps over the lazy dog "


def filler_of(input_bytes: int) -> str:
    """Words that fill an input up to `input_bytes` in all, which must be at least MIN_INPUT_BYTES."""
    return " " + "".join(islice(cycle(_FILLER), input_bytes - MIN_INPUT_BYTES))


def json_text(text: str) -> bytes:
    """The inside of a JSON string, characters beyond ASCII as they are."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode()


class Inputs:
    """Makes nonces, and knows what an input looks like reversed. `tag`: TAG_CHARACTERS letters or digits."""

    def __init__(self, tag: str, filler: str) -> None:
        self._tag = tag.encode("ascii")
        self.filler = filler
        self._reversed_filler = filler[::-1]
        self.reversed_before = b'"output":"' + json_text(self._reversed_filler)
        """What stands before the reversed nonce and a quote, in compact JSON whose output is an input reversed."""

    def nonce(self, number: int) -> bytes:
        """The first characters of input `number`: always NONCE_CHARACTERS long."""
        return b"%s%08x" % (self._tag, number & 0xFFFFFFFF)

    def reversed_text(self, nonce: bytes) -> str:
        """The input reversed, as text."""
        return self._reversed_filler + nonce[::-1].decode("ascii")
