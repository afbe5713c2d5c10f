"""Keeps a greedy text from going round in circles, by looking at nothing but the row's own text.

A small model that always takes the likeliest byte soon repeats one phrase for ever. Two rules hold where a word begins:
the last few long words are not begun again, and where two words stand that stood together before, neither is the word
that followed them then. Only first bytes of words are refused, so every word once begun can be finished and the text
stays spelled; the price is that another word with the same first letter is refused as well.
"""

from __future__ import annotations

from typing import Final

LONG: Final = 4
"""Letters from which a word counts as long: `the` and `of` may come again at once, `program` may not."""
RECENT: Final = 4
"""How many long words back are looked at; with more, text turns to lists of odd words."""
_SPACES: Final = b" \n\t"


def refused_bytes(drawn: bytes) -> set[int]:
    """Return the bytes that may not come next after the bytes drawn so far; none within a word."""
    if not drawn or drawn[-1] not in _SPACES:
        return set()
    words = drawn.split()
    pair = words[-2:]
    followers = [words[at + 2] for at in range(len(words) - 2) if words[at : at + 2] == pair]
    recent = [word for word in words if len(word) >= LONG][-RECENT:]
    return {word[0] for word in followers + recent}
