"""What of a row can be said before the row has its end: no half character, and nothing that a stop string may take back."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_pool.backends.backend import Listener
from gpu_pool.tiny import vocabulary


class Spoken:
    """Tells a listener a row's text as it grows, with the bytes of its stop strings in mind."""

    def __init__(self, listener: Listener, stops: Sequence[bytes]) -> None:
        self._listener = listener
        self._stops = stops
        self._decoder = vocabulary.decoder()
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
