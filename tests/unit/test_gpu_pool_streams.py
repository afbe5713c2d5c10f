"""Streams of a worker's batches: joined increments, bounded memory, cancellations, losses."""

from collections.abc import Sequence

import pytest

from gpu_pool.model_process.messages import Piece
from gpu_pool.worker.streams import MOST_CHARACTERS, BatchStreams, Outgoing, joined
from scheduler.protocol.batches import ClaimedRequest
from scheduler.protocol.replies import LOST, Increment, IncrementTarget

REQUESTS = [ClaimedRequest(name, 1000, 2, b"") for name in "abc"]


def inc(text: str, offset: int, attempt: int = 1) -> Increment:
    return Increment("r", "n", attempt, offset, text)


@pytest.mark.parametrize(
    ("before", "more", "whole"),
    [
        (None, inc("ab", 0), inc("ab", 0)),
        (inc("ab", 4), inc("cd", 6), inc("abcd", 4)),
        (inc("ab", 4), inc("cd", 7), None),  # A piece in between was dropped.
        (inc("ab", 4), inc("x", 0), inc("x", 0)),  # Run again.
        (inc("abc", 4), inc("bcd", 5), inc("abcd", 4)),
        (inc("ab", 4), inc("x", 0, 2), inc("x", 0, 2)),
        (inc("ab", 4), inc("", LOST), inc("", LOST)),
        (inc("", LOST), inc("x", 0), None),
    ],
)
def test_waiting_increments_are_joined(before: Increment | None, more: Increment, whole: Increment | None) -> None:
    """Adjacent and overlapping pieces become one; a gap drops the later piece."""
    assert joined(before, more) == whole


def test_waiting_text_is_bounded() -> None:
    """What does not fit while Redis hangs is dropped and counted."""
    outgoing = Outgoing(None)  # type: ignore[arg-type]
    half = MOST_CHARACTERS // 2
    for n in range(3):
        outgoing.add(IncrementTarget("g", "n"), inc("x" * half, n * half))

    assert (outgoing.dropped, outgoing._characters) == (1, MOST_CHARACTERS)


class Sent:
    """Records increments instead of sending them."""

    def __init__(self) -> None:
        self.increments: list[tuple[str, Increment]] = []

    def add(self, address: IncrementTarget, increment: Increment) -> None:
        self.increments.append((address.gateway_id, increment))


def test_pieces_and_losses_go_to_their_request() -> None:
    """Positions are those of the plan; unknown addresses and positions are ignored; a loss is sent once, and only to
    requests that had a piece.
    """
    sent = Sent()
    streams = BatchStreams(REQUESTS, sent)  # type: ignore[arg-type]
    streams.begin(["a", "c"], lambda _: None)

    streams.on_pieces([Piece(1, "g n", 3, "x"), Piece(0, "nowhere", 0, "y"), Piece(9, "g n", 0, "z")])
    streams.lost()
    streams.lost()

    assert sent.increments == [("g", Increment("c", "n", 2, 3, "x")), ("g", Increment("c", "n", 2, LOST, ""))]


def test_cancelled_requests_are_dropped_once() -> None:
    """Before the run they are left out of it; while it runs the model gets one Drop; after it nothing is sent."""
    streams, dropped = BatchStreams(REQUESTS, Sent()), list[Sequence[int]]()  # type: ignore[arg-type]

    streams.keep_only(frozenset("bc"))
    waiting = [request.id for request in streams.waiting(REQUESTS)]
    streams.begin(waiting, dropped.append)
    streams.keep_only(frozenset("b"))
    streams.keep_only(frozenset("b"))
    streams.end()
    streams.keep_only(frozenset())

    assert waiting == ["b", "c"]
    assert dropped == [[1]]
    assert streams.members == set()
