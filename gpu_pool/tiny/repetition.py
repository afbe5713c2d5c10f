"""Keeps a greedy text from going round in circles, by looking at nothing but the row's own text.

A small model that always takes the likeliest byte soon repeats one phrase for ever. The rule: where two words
stand that stood together before, the word that followed them then does not begin again. Only first bytes of words
are refused, so every word that is begun can be finished and the text stays spelled.
"""

from __future__ import annotations

_SPACES = b" \n\t"


def refused_bytes(drawn: bytes) -> set[int]:
    """Return the bytes that would begin, after the same two words as before, the same third word."""
    if not drawn or drawn[-1] not in _SPACES:
        return set()
    words = drawn.split()
    pair = words[-2:]
    return {words[at + 2][0] for at in range(len(words) - 2) if words[at : at + 2] == pair}
