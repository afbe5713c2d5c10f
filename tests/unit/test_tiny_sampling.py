"""How `tiny` chooses one token: literal scores in, token and clearness out."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_pool.backends.tiny import sampling
from gpu_pool.backends.tiny.model import BEGIN, decode, encode
from gpu_pool.backends.tiny.sampling import NOISE, ChosenTokens, choose, refused_bytes

HALF_QUARTERS = [math.log(0.25), math.log(0.5), math.log(0.25)]
"""Scores of three tokens with probabilities 1/4, 1/2, 1/4."""


def choose_one(scores: list[float], temperature: float, top_p: float = 1.0, uniform: float = 0.5) -> tuple[int, bool]:
    """Choose for a single row."""
    numbers = (torch.tensor([value], dtype=torch.float64) for value in (temperature, top_p, uniform))
    choice = choose(torch.tensor([scores], dtype=torch.float64), *numbers)
    return choice.tokens[0], choice.clear[0]


def test_greedy_takes_the_highest_score() -> None:
    """At temperature 0 the likeliest token wins, whatever the draw."""
    assert choose_one([1.0, 3.0, 2.0], 0.0, uniform=0.99) == (1, True)


def test_a_lead_within_noise_is_not_clear() -> None:
    """Two scores closer than noise on both could stand the other way round in another batch."""
    assert choose_one([1.0, 1.0 + NOISE, 0.0], 0.0)[1] is False
    assert choose_one([1.0, 1.0 + 3 * NOISE, 0.0], 0.0) == (1, True)


@pytest.mark.parametrize(("uniform", "token"), [(0.1, 0), (0.3, 1), (0.7, 1), (0.8, 2), (0.999999, 2)])
def test_a_draw_inverts_the_distribution(uniform: float, token: int) -> None:
    """Tokens own stretches of [0, 1) as long as their probabilities, in the order of their ids."""
    assert choose_one(HALF_QUARTERS, 1.0, uniform=uniform) == (token, True)


def test_a_draw_at_a_border_is_not_clear() -> None:
    """A draw that falls on the border of two tokens could go to either."""
    assert choose_one(HALF_QUARTERS, 1.0, uniform=0.25 + NOISE / 10)[1] is False


def test_top_p_leaves_out_the_tail() -> None:
    """With top_p under the likeliest token's share, only that one can be drawn."""
    assert {choose_one(HALF_QUARTERS, 1.0, 0.4, uniform)[0] for uniform in (0.0, 0.3, 0.6, 0.999)} == {1}


def test_a_tie_at_the_edge_of_top_p_is_not_clear() -> None:
    """Of two equally likely tokens only one gets in: which one, noise could turn."""
    assert choose_one(HALF_QUARTERS, 1.0, 0.6, 0.9)[1] is False


def test_a_low_temperature_is_nearly_greedy_and_clear() -> None:
    """Close to temperature 0 a draw is the likeliest token and does not fall to the slow path."""
    assert choose_one([1.0, 3.0, 2.0], 0.01, 0.9, 0.5) == (1, True)


def test_rows_of_one_call_follow_their_own_wishes() -> None:
    """A greedy row and a drawing row share a call."""
    scores = torch.tensor([HALF_QUARTERS, HALF_QUARTERS], dtype=torch.float64)
    wishes = torch.tensor([[0.0, 1.0, 0.9], [1.0, 1.0, 0.9]], dtype=torch.float64)
    assert choose(scores, *wishes.unbind(1)) == ChosenTokens([1, 2], [True, True])


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_the_nucleus_of_a_large_vocabulary_needs_no_full_sort(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    """The few likeliest tokens give the same choices as all of them, where they hold enough and where they do not."""
    chance = torch.Generator().manual_seed(3)
    scores = torch.randn(40, 3000, generator=chance, dtype=torch.float64) * spread
    temperature = torch.full((40,), 0.9, dtype=torch.float64)
    top_p = torch.linspace(0.05, 1.0, 40, dtype=torch.float64)
    uniform = torch.rand(40, generator=chance, dtype=torch.float64)
    quick = choose(scores, temperature, top_p, uniform)
    monkeypatch.setattr(sampling, "LIKELY", 3000)

    assert quick == choose(scores, temperature, top_p, uniform)
    assert sum(quick.clear) > 10


def test_a_refused_token_is_never_drawn() -> None:
    """A score of minus infinity owns nothing of [0, 1), not even its upper end."""
    scores = [0.0, 0.0, -math.inf]
    assert [choose_one(scores, 2.0, 1.0, uniform)[0] for uniform in (0.0, 0.4, 0.6, 1.0 - 2**-53)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("drawn", "refused"),
    [
        (b"", ""),
        (b"the cat sat on the cat", ""),
        (b"the cat sat on the cat ", "s"),
        (b"the cat sat, the cat ran, the cat ", "sr"),
        (b"the cat sat on the dog ", ""),
        (b"the program ", "p"),
        (b"alpha bravo is charlie of delta echo ", "bcde"),
        (b"alpha bravo is charlie of delta ech", ""),
    ],
)
def test_a_greedy_text_does_not_repeat_itself(drawn: bytes, refused: str) -> None:
    """Refused are a third word after the same two, and the last four long words; nothing within a word."""
    assert refused_bytes(drawn) == {ord(letter) for letter in refused}


@pytest.mark.parametrize(
    ("prompt", "keep", "expected"),
    [("", 5, b""), ("abc", 5, b"abc"), ("abcdef", 3, b"def"), ("aéé", 3, "é".encode()), ("a\ud800", 5, b"a?")],
)
def test_a_long_prompt_keeps_its_last_characters(prompt: str, keep: int, expected: bytes) -> None:
    """Over-long prompts lose their head, at a character's border; what is no text is replaced."""
    assert encode(prompt, keep) == [BEGIN, *expected]


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"ok", "ok"), ("né".encode(), "né"), ("né".encode()[:-1], "n"), (b"a\xffb", "a\ufffdb"), (b"", "")],
)
def test_text_is_always_valid(data: bytes, text: str) -> None:
    """Bad bytes become the replacement character; half a character at the end is left out."""
    assert decode(data) == text
