"""A model for `bench/cases/streams.py`: writes a word every 20 ms for each of its inputs, and notes when the first was there.

What it writes follows from the input, so a reader knows what must come. It stands for a GPU: it sleeps.
"""
# ruff: noqa: INP001 - found by its name in the model process, through PYTHONPATH

import os
import time
from collections.abc import Callable
from pathlib import Path

WORDS = 50
STEP_S = 0.02
NOTES = "STREAMS_NOTES"
"""The variable that names the file: a line `<input> <monotonic seconds>` for each, from every model process."""


def word(text: str, place: int) -> str:
    """One word."""
    return f"{text}:{place} "


def whole(text: str) -> str:
    """All that is written for an input."""
    return "".join(word(text, place) for place in range(WORDS))


class Typist:
    """The model."""

    def predict(self, texts: list[str]) -> list[str]:
        """At once."""
        return [whole(text) for text in texts]

    def generate(self, texts: list[str], tell: Callable[[list[str]], list[bool]]) -> list[str]:
        """Word by word."""
        for place in range(WORDS):
            time.sleep(STEP_S)
            if place == 0:
                _note(texts)
            tell([word(text, place) for text in texts])
        return self.predict(texts)


def _note(texts: list[str]) -> None:
    now = time.monotonic()
    with Path(os.environ[NOTES]).open("a", encoding="utf-8") as notes:
        notes.write("".join(f"{text} {now}\n" for text in texts))
