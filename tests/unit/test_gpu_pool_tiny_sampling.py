"""How `tiny` samples one token, and its conversion between text and tokens."""

import math

import pytest
import torch

from gpu_pool.backends.tiny import sampling
from gpu_pool.backends.tiny.model import BEGIN, decode, encode
from gpu_pool.backends.tiny.sampling import NOISE, choose, refused_bytes

SCORES = [math.log(0.25), math.log(0.5), math.log(0.25)]


@pytest.mark.parametrize(
    ("scores", "temperature", "top_p", "uniform", "token", "clear"),
    [
        ([1.0, 3.0, 2.0], 0.0, 1.0, 0.99, 1, True),  # Greedy.
        ([1.0, 1.0 + NOISE, 0.0], 0.0, 1.0, 0.5, None, False),
        ([1.0, 1.0 + 3 * NOISE, 0.0], 0.0, 1.0, 0.5, 1, True),
        (SCORES, 1.0, 1.0, 0.1, 0, True),
        (SCORES, 1.0, 1.0, 0.7, 1, True),
        (SCORES, 1.0, 1.0, 0.999999, 2, True),
        (SCORES, 1.0, 1.0, 0.25 + NOISE / 10, None, False),  # At the border of two tokens.
        (SCORES, 1.0, 0.4, 0.999, 1, True),  # top_p leaves one token.
        (SCORES, 1.0, 0.6, 0.9, None, False),  # Two equal tokens at the edge of top_p.
        ([1.0, 3.0, 2.0], 0.01, 0.9, 0.5, 1, True),
        ([0.0, 0.0, -math.inf], 2.0, 1.0, 1.0 - 2**-53, 1, False),  # A rejected token is never drawn.
    ],
)
def test_choice_of_a_token(
    scores: list[float], temperature: float, top_p: float, uniform: float, token: int | None, clear: bool
) -> None:
    """`clear` is False where another batch's rounding could give another token."""
    numbers = (torch.tensor([value], dtype=torch.float64) for value in (temperature, top_p, uniform))
    choice = choose(torch.tensor([scores], dtype=torch.float64), *numbers)

    assert choice.clear[0] is clear
    assert token is None or choice.tokens[0] == token


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_partial_sort_gives_the_same_choices(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    """For a large vocabulary the likeliest tokens suffice, or the full sort is used."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(40, 3000, generator=generator, dtype=torch.float64) * spread
    temperature = torch.full((40,), 0.9, dtype=torch.float64)
    top_p = torch.linspace(0.05, 1.0, 40, dtype=torch.float64)
    uniform = torch.rand(40, generator=generator, dtype=torch.float64)
    quick = choose(scores, temperature, top_p, uniform)
    monkeypatch.setattr(sampling, "LIKELY", 3000)

    assert quick == choose(scores, temperature, top_p, uniform)
    assert sum(quick.clear) > 10


@pytest.mark.parametrize(
    ("drawn", "rejected"),
    [
        (b"the cat sat on the cat", ""),
        (b"the cat sat on the cat ", "s"),
        (b"the cat sat, the cat ran, the cat ", "sr"),
        (b"the program ", "p"),
        (b"alpha bravo is charlie of delta echo ", "bcde"),
        (b"alpha bravo is charlie of delta ech", ""),
    ],
)
def test_repetition_is_rejected(drawn: bytes, rejected: str) -> None:
    """A third word after the same two, and the last four long words, cannot begin again."""
    assert refused_bytes(drawn) == {ord(character) for character in rejected}


@pytest.mark.parametrize(
    ("prompt", "keep", "expected"),
    [("", 5, b""), ("abc", 5, b"abc"), ("abcdef", 3, b"def"), ("aéé", 3, "é".encode()), ("a\ud800", 5, b"a?")],
)
def test_encode_keeps_the_last_characters(prompt: str, keep: int, expected: bytes) -> None:
    """The cut is between characters; lone surrogates are replaced."""
    assert encode(prompt, keep) == [BEGIN, *expected]


@pytest.mark.parametrize(
    ("data", "text"), [("né".encode(), "né"), ("né".encode()[:-1], "n"), (b"a\xffb", "a\ufffdb"), (b"", "")]
)
def test_decode_returns_valid_text(data: bytes, text: str) -> None:
    """Bad bytes become the replacement character; a partial character at the end is left out."""
    assert decode(data) == text
