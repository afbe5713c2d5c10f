"""One row of a batch: its tokens, its text, its random source, and when it ends; and detokenizing one token at a time.

A token may be half of a character, or a space only because of what is before it. So the tokens since the last settled
place are decoded together, and what that adds to the text before it is new. All pieces together are the text of all
tokens at once. The detokenizer is free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Literal

from gpu_pool.backends.backend import OutputListener
from gpu_pool.backends.generation import Generation, GenerationParameters
from gpu_pool.backends.tiny.row import StreamBuffer, draw_uniforms

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


class HfSequence:
    """The state of one continuation; knows nothing of the rows beside it. Text is kept in UTF-8, as stop strings are.

    `ends`: tokens by which the model says that it is done.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        parameters: GenerationParameters,
        ends: frozenset[int],
        decode: Decode,
        *,
        listener: OutputListener | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.parameters = parameters
        self.tokens = list(prompt)
        self.finished: Literal["stop", "length"] | None = None
        self.late = False
        self._deadline = deadline
        self._read = len(prompt)
        self._ends = ends
        self._text = bytearray()
        self._end: int | None = None
        self._detokenizer = Detokenizer(decode, prompt)
        self._uniforms = draw_uniforms(parameters)
        self._stops = [stop.encode("utf-8", errors="replace") for stop in parameters.stop]
        self._spoken = StreamBuffer(listener, self._stops) if listener is not None else None

    @property
    def repeatable(self) -> bool:
        """Whether the same request must bring the same text."""
        return self.parameters.temperature == 0.0 or self.parameters.seed is not None

    @property
    def drawn(self) -> int:
        """How many tokens were drawn, without the one that ends it."""
        return len(self.tokens) - self._read

    def next_uniform(self) -> float:
        """The chance for the next token, from [0, 1); asking again before `take` gives the same."""
        return self._uniforms[self.drawn]

    def take(self, token: int) -> None:
        """Add the token and see whether it ends the row."""
        if token in self._ends:
            self._finish("stop")
            return
        self.tokens.append(token)
        if self._stops or self._spoken is not None:
            self._add(self._detokenizer.add(token))
        if not self.finished and self.drawn == self.parameters.max_tokens:
            self._finish("length")

    def speak(self) -> None:
        """Tell who listens what has come; a row that nobody wants any more ends here."""
        if self._spoken is None:
            return
        if self.finished:
            self._spoken.ended(self._text[: self._end])
        else:
            self._spoken.grew(self._text)
            if self._spoken.unwanted:
                self.finished = "stop"

    def give_up(self, now: float) -> None:
        """End here, `late`, where nobody can use what would come after `now` (seconds, as the deadline is)."""
        if not self.finished and now >= self._deadline:
            self.late, self.finished = True, "length"

    def result(self) -> Generation:
        """Return the answer of a finished row."""
        if self.finished is None:
            raise RuntimeError("This is a bug: a row was asked for its answer before it was finished.")
        text = self._text[: self._end].decode("utf-8", errors="replace")
        return Generation(text, self._read, self.drawn, self.finished)

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        followed = self._stops or self._spoken is not None
        self.finished = reason
        self._add(self._detokenizer.rest(() if followed else self.tokens[self._read :]))

    def _add(self, piece: str) -> None:
        """Add to the text, and end it before the first stop string that is in it now."""
        longest = max(map(len, self._stops), default=0)
        since = max(0, len(self._text) - longest)
        self._text += piece.encode("utf-8", errors="replace")
        found = [at for stop in self._stops if (at := self._text.find(stop, since)) >= 0]
        if found:
            self._end, self.finished = min(found), "stop"
