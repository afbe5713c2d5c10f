"""One row of a batch: its tokens, its random numbers, when it ends, and which part of it can be streamed before that.

Streamed text has no partial characters, and nothing that may become part of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from gpu_pool.backends.backend import OutputListener
from gpu_pool.backends.generation import Generation, GenerationParameters
from gpu_pool.backends.tiny import model
from gpu_pool.backends.tiny.sampling import refused_bytes


class StreamBuffer:
    """Sends a row's text to a listener as it grows, except what may become a stop string."""

    def __init__(self, listener: OutputListener, stops: Sequence[bytes]) -> None:
        self._listener = listener
        self._stops = stops
        self._decoder = model.decoder()
        self._bytes = 0
        self._characters = 0

    @property
    def unwanted(self) -> bool:
        """The listener wants no more text."""
        return self._listener.gone

    def update(self, drawn: bytes | bytearray) -> None:
        """The row's bytes so far; more may follow."""
        self._say(drawn[: len(drawn) - held_back(drawn, self._stops)])

    def finish(self, text: bytes | bytearray) -> None:
        """All bytes of the finished row."""
        self._say(text)

    def _say(self, certain: bytes | bytearray) -> None:
        text = self._decoder.decode(bytes(certain[self._bytes :]))
        self._bytes = max(self._bytes, len(certain))
        if text:
            self._listener.emit(self._characters, text)
            self._characters += len(text)


def held_back(drawn: bytes | bytearray, stops: Sequence[bytes]) -> int:
    """The number of bytes at the end that could begin a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for size in range(min(len(drawn), longest), 0, -1):
        if any(size < len(stop) and drawn.endswith(stop[:size]) for stop in stops):
            return size
    return 0


class TextRow:
    """The state of one continuation, independent of the other rows. Text is kept in UTF-8, as stop strings are."""

    def __init__(self, prompt: list[int], parameters: GenerationParameters, listener: OutputListener | None) -> None:
        self.parameters = parameters
        self.tokens = prompt
        self.finished: Literal["stop", "length"] | None = None
        self._read = len(prompt)
        self._text = bytearray()
        self._end: int | None = None
        # All random numbers are drawn at the start, by an own generator, so that other rows have no effect.
        self._uniforms = [0.0] * parameters.max_tokens
        if parameters.temperature:
            generator = torch.Generator()
            if parameters.seed is None:
                generator.seed()
            else:
                generator.manual_seed(parameters.seed)
            self._uniforms = torch.rand(parameters.max_tokens, generator=generator, dtype=torch.float64).tolist()
        self._stops = [stop.encode("utf-8", errors="replace") for stop in parameters.stop]
        self._stream = StreamBuffer(listener, self._stops) if listener is not None else None

    @property
    def repeatable(self) -> bool:
        """Whether the same request must give the same text."""
        return self.parameters.temperature == 0.0 or self.parameters.seed is not None

    @property
    def drawn(self) -> int:
        """Number of new tokens, without the end token."""
        return len(self.tokens) - self._read

    def next_uniform(self) -> float:
        """The random number for the next token, from [0, 1); the same until the next token is taken."""
        return self._uniforms[self.drawn]

    def stream(self) -> None:
        """Send new text to the listener; a row whose listener has left ends here."""
        if self._stream is None:
            return
        if self.finished:
            self._stream.finish(self._text[: self._end])
        else:
            self._stream.update(self._text)
            if self._stream.unwanted:
                self.finished = "stop"

    def generation(self, text: str, tokens_in: int) -> Generation:
        """The result of a finished row, with this text and so many prompt tokens."""
        if self.finished is None:
            raise RuntimeError("The result of a row was read before it was finished; this is a bug.")
        return Generation(text, tokens_in, self.drawn, self.finished)


class TinySequence(TextRow):
    """A row of `tiny`, whose tokens are bytes."""

    @classmethod
    def start(
        cls, prompt: str, parameters: GenerationParameters, context: int, listener: OutputListener | None = None
    ) -> TinySequence:
        """Create a row; the prompt is cut at its beginning so that `max_tokens` fit into the context."""
        return cls(model.encode(prompt, context - 1 - parameters.max_tokens), parameters, listener)

    @property
    def used(self) -> int:
        """Number of tokens of the prompt that were read, and of new ones."""
        return len(self.tokens) - 1

    @property
    def longest(self) -> int:
        """The most tokens that this row can grow to."""
        return self._read + self.parameters.max_tokens

    def refused(self) -> list[int]:
        """Tokens that must not come next: marks that are not text, an end before any text, and greedy repetition."""
        refused = {model.BEGIN, model.PAD}
        if not self._text.strip():
            refused.add(model.END)
        if self.parameters.temperature == 0.0:
            refused |= refused_bytes(bytes(self._text))
        return sorted(refused)

    def take(self, token: int) -> None:
        """Add the token; it may end the row."""
        if token == model.END:
            self.finished = "stop"
            return
        self.tokens.append(token)
        self._text.append(token)
        # The text ends before a stop string that was just completed, the earliest if several were.
        lengths = [len(stop) for stop in self._stops if self._text.endswith(stop)]
        if lengths:
            self._end, self.finished = len(self._text) - max(lengths), "stop"
        elif self.drawn == self.parameters.max_tokens:
            self.finished = "length"

    def result(self) -> Generation:
        """The result of a finished row."""
        return self.generation(model.decode(self._text[: self._end]), self._read - 1)
