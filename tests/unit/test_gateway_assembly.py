"""A stream's text from increments: whatever is lost, late or doubled, what was sent is the beginning of the output."""

import random

import pytest

from gateway.inference.streaming import StreamAssembly
from scheduler.protocol.replies import LOST

Step = tuple[int, int, str, str]
"""Attempt, offset, text, and what is sent of it."""


@pytest.mark.parametrize(
    ("steps", "broken"),
    [
        ([(1, 0, "ab", "ab"), (1, 2, "cd", "cd")], False),
        ([(1, 0, "ab", "ab"), (1, 0, "ab", "")], False),  # Told twice.
        ([(1, 0, "ab", "ab"), (1, 1, "bcd", "cd")], False),  # It overlaps.
        ([(1, 0, "ab", "ab"), (1, 3, "d", ""), (1, 2, "cd", "cd")], False),  # Out of order: a gap is waited for.
        ([(1, 2, "cd", "")], False),
        ([(1, 0, "ab", "ab"), (1, 0, "x", "")], True),  # Run again without an attempt, and other text came out.
        ([(1, 0, "ab", "ab"), (1, 0, "abc", "c")], False),  # The same came out.
        ([(1, 0, "ab", "ab"), (2, 0, "ab", "")], True),  # Its worker was lost.
        ([(1, 0, "ab", "ab"), (1, LOST, "", ""), (1, 2, "cd", "")], True),
        ([(1, LOST, "", ""), (2, 0, "ab", "ab"), (2, 2, "c", "c")], False),  # Lost before anything was sent.
        ([(2, 0, "ab", "ab"), (1, 2, "zz", ""), (1, LOST, "", "")], False),  # The lost worker still writes.
        ([(1, 0, "", ""), (2, 0, "ab", "ab")], False),  # Nothing is no text.
        ([(1, 0, "é😀", "é😀"), (1, 2, "x", "x")], False),  # Characters are counted, not bytes.
    ],
)
def test_increments(steps: list[Step], broken: bool) -> None:
    """What is sent of each, and whether the stream can go on."""
    assembly = StreamAssembly()

    sent = [assembly.take(attempt, offset, text) for attempt, offset, text, _ in steps]

    assert sent == [expected for *_, expected in steps]
    assert assembly.broken is broken


@pytest.mark.parametrize(
    ("heard", "output", "attempts", "rest"),
    [
        ([], "abcd", 1, "abcd"),
        ([], "abcd", 3, "abcd"),
        ([], "", 1, ""),
        ([(1, 0, "ab")], "abcd", 1, "cd"),
        ([(1, 0, "abcd")], "abcd", 1, ""),
        ([(1, 0, "ab")], "xbcd", 1, None),
        ([(1, 0, "ab")], "a", 1, None),
        ([(1, 0, "ab")], "abcd", 2, None),
        ([(1, 0, "ab"), (1, LOST, "")], "abcd", 1, None),
    ],
)
def test_the_end(heard: list[tuple[int, int, str]], output: str, attempts: int, rest: str | None) -> None:
    """The stored reply fills what is missing, unless it is not what was begun."""
    assembly = StreamAssembly()
    for increment in heard:
        assembly.take(*increment)

    assert assembly.rest(output, attempts) == rest


@pytest.mark.parametrize("seed", range(50))
def test_any_channel_gives_the_output(seed: int) -> None:
    """Dropped, doubled, shuffled, cut elsewhere: together with the end it is the output, and every step its beginning."""
    chance = random.Random(seed)
    output = "".join(chance.choices("abcé😀", k=60))
    cuts = [sorted(chance.sample(range(61), 2)) for _ in range(40)]
    increments = [(1, start, output[start:end]) for start, end in cuts if chance.random() < 0.7]
    assembly, sent = StreamAssembly(), ""

    for increment in increments:
        sent += assembly.take(*increment)
        assert output.startswith(sent)

    rest = assembly.rest(output, 1)
    assert rest is not None
    assert sent + rest == output
