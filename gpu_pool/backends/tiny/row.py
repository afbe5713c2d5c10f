"""One row of a batch: its tokens, its random source, when it ends, and what of it can be streamed before that.

What can be streamed has no half character, and nothing that a stop string may take back.
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
    """Tells a listener a row's text as it grows, with the bytes of its stop strings in mind."""

    def __init__(self, listener: OutputListener, stops: Sequence[bytes]) -> None:
        self._listener = listener
        self._stops = stops
        self._decoder = model.decoder()
        self._bytes = 0
        self._characters = 0

    @property
    def unwanted(self) -> bool:
        """Nobody listens any more."""
        return self._listener.gone

    def grew(self, drawn: bytes | bytearray) -> None:
        """These are the row's bytes so far, which may go on."""
        self._say(drawn[: len(drawn) - held_back(drawn, self._stops)])

    def ended(self, text: bytes | bytearray) -> None:
        """These are all that stays of them."""
        self._say(text)

    def _say(self, certain: bytes | bytearray) -> None:
        text = self._decoder.decode(bytes(certain[self._bytes :]))
        self._bytes = max(self._bytes, len(certain))
        if text:
            self._listener.say(self._characters, text)
            self._characters += len(text)


def held_back(drawn: bytes | bytearray, stops: Sequence[bytes]) -> int:
    """How many of the last bytes could be the beginning of a stop string."""
    return max((_begun(drawn, stop) for stop in stops), default=0)


def _begun(drawn: bytes | bytearray, stop: bytes) -> int:
    return next((n for n in range(min(len(drawn), len(stop) - 1), 0, -1) if drawn.endswith(stop[:n])), 0)


class TinySequence:
    """The state of one continuation; knows nothing of the rows beside it."""

    def __init__(
        self,
        prompt: list[int],
        parameters: GenerationParameters,
        uniforms: list[float],
        listener: OutputListener | None = None,
    ) -> None:
        self.parameters = parameters
        self.tokens = prompt
        self.finished: Literal["stop", "length"] | None = None
        self._read = len(prompt)
        self._drawn = bytearray()
        self._end = 0
        self._uniforms = uniforms
        self._stops = [stop.encode("utf-8", errors="replace") for stop in parameters.stop]
        self._spoken = StreamBuffer(listener, self._stops) if listener is not None else None

    @classmethod
    def start(
        cls, prompt: str, parameters: GenerationParameters, context: int, listener: OutputListener | None = None
    ) -> TinySequence:
        """Set a row up; the prompt keeps as many of its last bytes as leave room for `max_tokens` in the context."""
        tokens = model.encode(prompt, context - 1 - parameters.max_tokens)
        return cls(tokens, parameters, draw_uniforms(parameters), listener)

    @property
    def longest(self) -> int:
        """The most tokens this row can grow to."""
        return self._read + self.parameters.max_tokens

    @property
    def repeatable(self) -> bool:
        """Whether the same request must bring the same text."""
        return self.parameters.temperature == 0.0 or self.parameters.seed is not None

    def next_uniform(self) -> float:
        """The chance for the next token, from [0, 1); asking again before `take` gives the same."""
        return self._uniforms[len(self._drawn)]

    def refused(self) -> list[int]:
        """Tokens that may not come next: marks that are not text, an end before any text, and greedy repetition."""
        refused = {model.BEGIN, model.PAD}
        if not self._drawn.strip():
            refused.add(model.END)
        if self.parameters.temperature == 0.0:
            refused |= refused_bytes(bytes(self._drawn))
        return sorted(refused)

    def take(self, token: int) -> None:
        """Add the token and see whether it ends the row."""
        if token == model.END:
            self.finished = "stop"
            return
        self.tokens.append(token)
        self._drawn.append(token)
        self._end = len(self._drawn)
        if self._cut_at_stop():
            self.finished = "stop"
        elif len(self._drawn) == self.parameters.max_tokens:
            self.finished = "length"

    def speak(self) -> None:
        """Tell who listens what has come; a row that nobody wants any more ends here."""
        if self._spoken is None:
            return
        if self.finished:
            self._spoken.ended(self._drawn[: self._end])
        else:
            self._spoken.grew(self._drawn)
            if self._spoken.unwanted:
                self.finished = "stop"

    def _cut_at_stop(self) -> bool:
        """End the text before a stop string that has just been completed, the earliest if several have."""
        lengths = [len(stop) for stop in self._stops if self._drawn.endswith(stop)]
        self._end -= max(lengths, default=0)
        return bool(lengths)

    def result(self) -> Generation:
        """Return the answer of a finished row."""
        if self.finished is None:
            raise RuntimeError("This is a bug: a row was asked for its answer before it was finished.")
        text = model.decode(self._drawn[: self._end])
        return Generation(text, self._read - 1, len(self._drawn), self.finished)


def draw_uniforms(parameters: GenerationParameters) -> list[float]:
    """Draw all of a row's chance at the start, from a generator of its own, so that no neighbour can shift it."""
    if parameters.temperature == 0.0:
        return [0.0] * parameters.max_tokens
    generator = torch.Generator()
    if parameters.seed is None:
        generator.seed()
    else:
        generator.manual_seed(parameters.seed)
    return torch.rand(parameters.max_tokens, generator=generator, dtype=torch.float64).tolist()
