"""Streams of a worker's batches: joined increments, bounded memory, cancellations, losses."""

import asyncio
from collections.abc import Sequence

import pytest

from eventually import eventually
from gpu_pool.model_process.messages import Piece
from gpu_pool.worker.streams import MOST_CHARACTERS, BatchStreams, Outgoing, joined
from scheduler.errors import RedisUnavailable
from scheduler.protocol.batches import ClaimedRequest
from scheduler.protocol.increments import LOST, Increment, IncrementTarget
from scheduler.tasks import end_all

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


class Channel:
    """A gateway's channel with a scripted subscription: True, False or an error for each message, then True."""

    def __init__(self, *script: bool | Exception) -> None:
        self._script = list(script)
        self.messages: list[list[Increment]] = []

    async def publish(self, _: str, increments: Sequence[Increment]) -> bool:
        self.messages.append(list(increments))
        found = self._script.pop(0) if self._script else True
        if isinstance(found, Exception):
            raise found
        return found


AWAY = RedisUnavailable("away")


@pytest.mark.parametrize(
    ("script", "times", "sent"),
    [
        ([], [0, 0, 0], ["ab", "cd", "ef"]),
        ([False], [0, 0, 0], ["ab", "abcd", "ef"]),
        ([AWAY, False], [0, 0, 0], ["ab", "abcd", "abcdef"]),
        ([False, False], [0, 0.6, 0.6], ["ab", "abcd", "ef"]),  # Absent for too long: the stored reply has the rest.
        ([False, True, False, True], [0, 0.6, 1.2, 1.3], ["ab", "abcd", "ef", "efgh"]),
    ],
)
async def test_text_without_a_subscriber_goes_again_with_the_next(
    script: list[bool | Exception], times: list[float], sent: list[str]
) -> None:
    """Nothing is repeated while the gateway is subscribed; the text of a gateway that is absent for long is dropped."""
    now = [0.0]
    channel = Channel(*script)
    outgoing = Outgoing(channel, lambda: now[0])  # type: ignore[arg-type]
    task = asyncio.create_task(outgoing.run())
    for place, at in enumerate(times):
        now[0] = at
        outgoing.add(IncrementTarget("g", "n"), inc("abcdefgh"[2 * place : 2 * place + 2], 2 * place))
        await eventually(lambda place=place: len(channel.messages) == place + 1, "the message")
    await end_all([task])

    assert ["".join(each.text for each in message) for message in channel.messages] == sent


async def test_increments_of_a_few_milliseconds_go_together() -> None:
    """The first one is sent at once; those of all streams that follow closely are one message, unless a stream begins."""
    channel = Channel()
    outgoing = Outgoing(channel)  # type: ignore[arg-type]
    task = asyncio.create_task(outgoing.run())
    outgoing.add(IncrementTarget("g", "n"), inc("ab", 0))
    for _ in range(3):
        await asyncio.sleep(0)
    begun = len(channel.messages)
    outgoing.add(IncrementTarget("g", "n"), inc("cd", 2))
    outgoing.add(IncrementTarget("g", "m"), Increment("other", "m", 1, 5, "x"))
    outgoing.add(IncrementTarget("g", "n"), inc("ef", 4))
    await asyncio.sleep(0)
    waited = len(channel.messages)
    await eventually(lambda: len(channel.messages) == 2, "the second message")
    outgoing.add(IncrementTarget("g", "k"), Increment("new", "k", 1, 0, "x"))
    for _ in range(3):
        await asyncio.sleep(0)
    await end_all([task])

    assert (begun, waited) == (1, 1)
    assert channel.messages == [
        [inc("ab", 0)],
        [inc("cdef", 2), Increment("other", "m", 1, 5, "x")],
        [Increment("new", "k", 1, 0, "x")],
    ]


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
