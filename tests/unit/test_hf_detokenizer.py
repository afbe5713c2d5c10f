"""Tokens become text one at a time: nothing is said that a later token could change, and nothing is lost."""

import pytest

from gpu_pool.backends.hf.row import Detokenizer

BYTES = "é日 ok!".encode()


def by_bytes(tokens: object) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")  # type: ignore[call-overload, no-any-return]


def by_words(tokens: object) -> str:
    """One that puts a space before every word but the first of what it decodes."""
    words = {0: "the", 1: "sea", 2: "is", 3: "deep"}
    return " ".join(words[token] for token in tokens)  # type: ignore[attr-defined]


def test_half_a_character_waits_for_its_rest() -> None:
    """The pieces are whole characters."""
    detokenizer = Detokenizer(by_bytes, b"say: ")

    assert [detokenizer.add(token) for token in BYTES] == ["", "é", "", "", "日", " ", "o", "k", "!"]
    assert detokenizer.rest() == ""


def test_a_space_that_depends_on_the_prompt_is_kept() -> None:
    """Decoded alone, a continuation would lose the space that divides it from its prompt."""
    detokenizer = Detokenizer(by_words, [0, 1])

    assert [detokenizer.add(2), detokenizer.add(3)] == [" is", " deep"]


@pytest.mark.parametrize("cut", range(len(BYTES) + 1))
def test_pieces_together_are_what_all_at_once_gives(cut: int) -> None:
    """Whether somebody reads along or not, the text is the same, wherever it ends."""
    one_by_one, at_once = Detokenizer(by_bytes, b"x"), Detokenizer(by_bytes, b"x")

    pieces = [one_by_one.add(token) for token in BYTES[:cut]]

    assert "".join(pieces) + one_by_one.rest() == at_once.rest(BYTES[:cut])


def test_a_character_cut_off_at_the_end_is_left_out() -> None:
    """Its bytes would be shown as a replacement mark."""
    detokenizer = Detokenizer(by_bytes, b"x")

    assert [detokenizer.add(0x61), detokenizer.add(0xE6)] == ["a", ""]
    assert detokenizer.rest() == ""
