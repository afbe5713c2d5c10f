"""From tokens to text one at a time: a token may be half of a character, or a space only because of what is before it.

So the tokens since the last settled place are decoded together, and what that adds to the text before it is the news.
Pieces together are the text of all tokens at once. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]
UNFINISHED: Final = "\ufffd"
"""What decoders make of a character of which bytes are missing."""
_BEFORE: Final = 5
"""Tokens of the prompt that are decoded with the first new one; decoders look back no further than one or two."""


class Detokenizer:
    """The text that follows a prompt."""

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt[-_BEFORE:])
        self._start = 0
        self._settled = len(self._tokens)

    def add(self, token: int) -> str:
        """The text that is certain now and was not before; often one word, sometimes nothing."""
        self._tokens.append(token)
        piece = self._piece()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        self._start, self._settled = self._settled, len(self._tokens)
        return piece

    def rest(self, tokens: Sequence[int] = ()) -> str:
        """What is left, with these tokens after it; a character cut off at the very end is left out."""
        self._tokens += tokens
        piece = self._piece().rstrip(UNFINISHED)
        self._start = self._settled = len(self._tokens)
        return piece

    def _piece(self) -> str:
        before = self._decode(self._tokens[self._start : self._settled])
        return self._decode(self._tokens[self._start :])[len(before) :]
