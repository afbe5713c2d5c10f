"""Sampling: chooses each row's next token, reports whether rounding could change the choice, and prevents repetition.

The same row gets scores that differ in the last digits with its batch, since matrix kernels add up in another order for
another shape. Rounding scores to a grid does not help; it only moves the places where a tiny difference decides. So a
choice is *clear* only if no score moving by `NOISE` could change it. Clear choices are the same in every batch; for the
rare others the caller computes the row alone, which is the same for every batch.

A small model that always takes the likeliest byte soon repeats one phrase. Two rules apply where a word begins: the
last few long words are not begun again, and after two words that occurred together before, the word that followed them
then is not begun again. Only first bytes of words are rejected, so every word once begun can be finished; other words
with the same first letter are rejected as well. Both rules depend only on the row's own text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

NOISE: Final = 1e-4
"""How far a score may differ between batches: about seven times the largest measured difference in float32."""


LIKELY: Final = 512
"""So many of the likeliest tokens nearly always contain the nucleus; sorting 50,000 takes longer than a step."""
MARGIN: Final = 1e-3
"""Probability beyond the nucleus that these must have, so that rounding cannot move its edge past them."""

LONG: Final = 4
"""Letters from which a word is long: `the` and `of` may be repeated at once, `program` may not."""
RECENT: Final = 4
"""How many long words are remembered; with more, text turns into lists of odd words."""
_SPACES: Final = b" \n\t"


@dataclass(frozen=True)
class ChosenTokens:
    """The token chosen for each row, and whether rounding noise cannot change it."""

    tokens: list[int]
    clear: list[bool]


def choose(scores: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> ChosenTokens:
    """Choose a token for each row of `scores` (rows, vocabulary; float64).

    `temperature`, `top_p` and `uniform` (from [0, 1)) are float64, one for each row, on the same device; at temperature
    0 the likeliest token is chosen and the other two are ignored.
    """
    greedy = temperature == 0.0
    best = scores.topk(2, dim=-1)
    tokens, clear = best.indices[:, 0], best.values[:, 0] - best.values[:, 1] > 2 * NOISE
    if bool(greedy.all()):
        return ChosenTokens(tokens.tolist(), clear.tolist())

    # For the other rows, invert the distribution function at `uniform`, over the tokens in the order of their ids. Unlike an
    # order by probability, this one does not change when two probabilities nearly tie.
    temperature = torch.where(greedy, 1.0, temperature)
    scaled = scores / temperature.unsqueeze(1)
    slack = 2 * NOISE / temperature.unsqueeze(1)
    # All tokens may be drawn, except in rows whose `top_p` is under 1.
    kept, nucleus_clear = torch.ones_like(scaled, dtype=torch.bool), torch.ones_like(top_p, dtype=torch.bool)
    narrow = (top_p < 1.0).nonzero().squeeze(1)
    if len(narrow):
        kept[narrow], nucleus_clear[narrow] = _nucleus(scaled[narrow], top_p[narrow].unsqueeze(1), slack[narrow])
    reached = torch.softmax(scaled.masked_fill(~kept, -torch.inf), dim=-1).cumsum(dim=-1)
    point = uniform.unsqueeze(1)
    # Rounding may leave the last sum slightly under 1; the last kept token gets the rest.
    last = scores.shape[1] - 1 - kept.flip(1).to(torch.uint8).argmax(dim=-1)
    drawn = torch.minimum((reached <= point).sum(dim=-1), last)
    drawn_clear = ((reached - point).abs() > _reach(reached, slack)).all(dim=-1) & nucleus_clear
    tokens, clear = torch.where(greedy, tokens, drawn), torch.where(greedy, clear, drawn_clear)
    return ChosenTokens(tokens.tolist(), clear.tolist())


def _nucleus(scaled: Tensor, top_p: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens are kept (the likeliest that together have `top_p`) and whether that set is clear."""
    every = torch.softmax(scaled, dim=-1)
    is_enough = False
    if scaled.shape[1] > LIKELY:
        ordered, order = scaled.topk(LIKELY, dim=-1)
        is_enough = bool((every.gather(1, order).sum(dim=-1, keepdim=True) > top_p + MARGIN).all())
    if not is_enough:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    shares = every.gather(1, order)
    before = shares.cumsum(dim=-1) - shares
    inside = before < top_p
    kept = torch.zeros_like(scaled, dtype=torch.bool).scatter(1, order, inside)
    edge = ((before - top_p).abs() > _reach(before, slack)).all(dim=-1)
    swap = ((ordered[:, :-1] - ordered[:, 1:] > slack) | (inside[:, :-1] == inside[:, 1:])).all(dim=-1)
    return kept, edge & swap


def _reach(share: Tensor, slack: Tensor) -> Tensor:
    """How far a sum of probabilities can move if each score moves by NOISE: its derivative is share * (1 - share)."""
    return slack * share * (1.0 - share) + 1e-12


def refused_bytes(drawn: bytes) -> set[int]:
    """The bytes that must not come next after the bytes drawn so far; none within a word."""
    if not drawn or drawn[-1] not in _SPACES:
        return set()
    words = drawn.split()
    pair = words[-2:]
    followers = [words[at + 2] for at in range(len(words) - 2) if words[at : at + 2] == pair]
    recent = [word for word in words if len(word) >= LONG][-RECENT:]
    return {word[0] for word in followers + recent}
