"""One row of a batch: its tokens, its text, its random numbers, and when it ends; and incremental detokenization.

A token may be part of a character, or a space that depends on the token before it. So the tokens since the last settled
position are decoded together, and the difference to the text before is new. All pieces together are the text of all
tokens. The detokenizer works without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from gpu_pool.backends.backend import OutputListener
from gpu_pool.backends.generation import Generation, GenerationParameters
from gpu_pool.backends.tiny.row import TextRow

Decode = Callable[[Sequence[int]], str]
UNFINISHED: Final = "\ufffd"
"""What decoders return for an incomplete character."""
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
        """The remaining text, after these tokens; a partial character at the very end is left out."""
        self._tokens += tokens
        piece = self._piece().rstrip(UNFINISHED)
        self._start = self._settled = len(self._tokens)
        return piece

    def _piece(self) -> str:
        before = self._decode(self._tokens[self._start : self._settled])
        return self._decode(self._tokens[self._start :])[len(before) :]


class HfSequence(TextRow):
    """A row of a language model. `ends`: tokens that end the text."""

    def __init__(
        self,
        prompt: Sequence[int],
        parameters: GenerationParameters,
        ends: frozenset[int],
        decode: Decode,
        *,
        listener: OutputListener | None = None,
    ) -> None:
        super().__init__(list(prompt), parameters, listener)
        self._ends = ends
        self._detokenizer = Detokenizer(decode, prompt)

    @property
    def used(self) -> int:
        """Number of tokens of the prompt and of new ones."""
        return len(self.tokens)

    def take(self, token: int) -> None:
        """Add the token; it may end the row."""
        if token in self._ends:
            self._finish("stop")
            return
        self.tokens.append(token)
        if self._stops or self._stream is not None:
            self._add(self._detokenizer.add(token))
        if not self.finished and self.drawn == self.parameters.max_tokens:
            self._finish("length")

    def result(self) -> Generation:
        """The result of a finished row."""
        return self.generation(self._text[: self._end].decode("utf-8", errors="replace"), self._read)

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        followed = self._stops or self._stream is not None
        self.finished = reason
        self._add(self._detokenizer.rest(() if followed else self.tokens[self._read :]))

    def _add(self, piece: str) -> None:
        """Add to the text, and end it before its first stop string."""
        longest = max(map(len, self._stops), default=0)
        since = max(0, len(self._text) - longest)
        self._text += piece.encode("utf-8", errors="replace")
        found = [at for stop in self._stops if (at := self._text.find(stop, since)) >= 0]
        if found:
            self._end, self.finished = min(found), "stop"
