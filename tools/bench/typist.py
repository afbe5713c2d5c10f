"""A model for `tools/bench/cases/streams.py`: writes a word every 20 ms for each input, and logs the time of the first.

The text follows from the input, so a client can verify it.
"""
# ruff: noqa: INP001 - found by its name in the model process, through PYTHONPATH

import os
import time
from collections.abc import Callable
from pathlib import Path

WORDS = 50
STEP_S = 0.02
NOTES = "STREAMS_NOTES"
"""The variable with the log file: a line `<input> <monotonic seconds>` for each input."""


def word(text: str, place: int) -> str:
    """One word of the text."""
    return f"{text}:{place} "


def whole(text: str) -> str:
    """The whole text of an input."""
    return "".join(word(text, place) for place in range(WORDS))


class Typist:
    """The model."""

    def predict(self, texts: list[str]) -> list[str]:
        """Return the whole texts."""
        return [whole(text) for text in texts]

    def generate(self, texts: list[str], tell: Callable[[list[str]], list[bool]]) -> list[str]:
        """Write the texts word by word."""
        for place in range(WORDS):
            time.sleep(STEP_S)
            if place == 0:
                _log(texts)
            tell([word(text, place) for text in texts])
        return self.predict(texts)


def _log(texts: list[str]) -> None:
    now = time.monotonic()
    with Path(os.environ[NOTES]).open("a", encoding="utf-8") as notes:
        notes.write("".join(f"{text} {now}\n" for text in texts))
