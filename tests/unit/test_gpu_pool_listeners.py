"""What a model's streams are told, from its steps to the frames, the supervisor and the message to a gateway."""

from typing import Any

import pytest

from gpu_pool.backends.backend import InvalidOutput, Item
from gpu_pool.backends.function import FunctionBackend
from gpu_pool.backends.tiny.row import StreamBuffer, held_back
from gpu_pool.model_process.inputs import AGAIN, PIECES_EVERY_S, Listeners
from gpu_pool.model_process.messages import Piece, Pieces
from gpu_pool.worker.streams import MOST_CHARACTERS, BatchStreams, Outgoing, joined
from scheduler.protocol.batches import ClaimedRequest
from scheduler.protocol.replies import LOST, Increment, IncrementTarget


class Ears:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, str]] = []
        self.gone = self.late = False

    def say(self, offset: int, text: str) -> None:
        self.heard.append((offset, text))

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.heard)


class Steps:
    """Listeners with a clock in the test's hands."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[Pieces] = []
        self.listeners = Listeners(self.sent.append, lambda: self.now)
        self.listeners.begin(7)

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.listeners.flush()


def test_the_first_piece_goes_at_once_and_the_others_together() -> None:
    """One frame a step at most, and after the first of an item one in 20 ms: what was said meanwhile is one piece."""
    steps = Steps()
    a, b = steps.listeners.listen(0, "g n1"), steps.listeners.listen(3, "g n2")

    a.say(0, "x")
    b.say(0, "y")
    steps.step(0)
    a.say(1, "1")
    steps.step(PIECES_EVERY_S / 4)
    a.say(2, "2")
    steps.step(PIECES_EVERY_S)
    steps.step(PIECES_EVERY_S)

    assert steps.sent == [
        Pieces(7, [Piece(0, "g n1", 0, "x"), Piece(3, "g n2", 0, "y")]),
        Pieces(7, [Piece(0, "g n1", 0, "x12")]),
    ]


def test_what_was_sent_lately_is_sent_again() -> None:
    """A message that is lost is made good by the next one, without anybody asking; what is older is not repeated for ever."""
    steps = Steps()
    a = steps.listeners.listen(0, "g n")
    for place in range(AGAIN + 2):
        a.say(place, str(place))
        steps.step(2 * PIECES_EVERY_S)

    last = steps.sent[-1].pieces[0]
    assert len(steps.sent) == AGAIN + 2
    assert (last.offset, last.text) == (1, "".join(map(str, range(1, AGAIN + 2))))


def test_an_item_that_is_run_again_begins_again() -> None:
    """A batch that was taken apart: the second run's first piece is as urgent, and what was not sent is forgotten."""
    steps = Steps()
    a = steps.listeners.listen(0, "g n")
    a.say(0, "x")
    steps.step(0)
    a.say(1, "lost")

    a.say(0, "x")
    steps.step(0)

    assert steps.sent[1:] == [Pieces(7, [Piece(0, "g n", 0, "x")])]  # Nothing of the first run is repeated.


def test_who_left_is_told_nothing() -> None:
    """And what is dropped of another batch is no matter of this one."""
    steps = Steps()
    a, b = steps.listeners.listen(0, "g n"), steps.listeners.listen(1, "g n")

    steps.listeners.drop(6, [1])
    steps.listeners.drop(7, [0, 5])
    a.say(0, "x")
    steps.step(1)

    assert (a.gone, b.gone, steps.sent) == (True, False, [])


@pytest.mark.parametrize(
    ("drawn", "stops", "held"),
    [
        (b"abc", [], 0),
        (b"abc", [b"x"], 0),
        (b"abc", [b"cd"], 1),
        (b"abc", [b"cd", b"bcd"], 2),
        (b"aa", [b"aaaa"], 2),
        (b"ab", [b"abab"], 2),
        (b"", [b"ab"], 0),
    ],
)
def test_what_could_become_a_stop_string_is_held_back(drawn: bytes, stops: list[bytes], held: int) -> None:
    """The longest end that a stop string begins with."""
    assert held_back(drawn, stops) == held


def test_what_was_said_is_never_taken_back() -> None:
    """Byte by byte: no half character, nothing of a stop string, and together all that stays."""
    text = "naïve 😀 end"
    whole, ears = text.encode() + b"STOP", Ears()
    spoken = StreamBuffer(ears, [b"STOP", b"TOPS"])

    for length in range(1, len(whole)):
        spoken.grew(whole[:length])
        assert text.startswith(ears.text)
    spoken.ended(text.encode())
    spoken.ended(text.encode())

    assert ears.text == text
    assert [offset for offset, _ in ears.heard] == [
        sum(len(said) for _, said in ears.heard[:i]) for i in range(len(ears.heard))
    ]


def add(text: str, offset: int, attempt: int = 1) -> Increment:
    return Increment("r", "n", attempt, offset, text)


@pytest.mark.parametrize(
    ("before", "more", "whole"),
    [
        (None, add("ab", 0), add("ab", 0)),
        (add("ab", 4), add("cd", 6), add("abcd", 4)),
        (add("ab", 4), add("cd", 7), None),  # What came between was dropped.
        (add("ab", 4), add("x", 0), add("x", 0)),  # Run again.
        (add("ab", 0), add("x", 0), add("x", 0)),
        (add("abc", 4), add("bcd", 5), add("abcd", 4)),  # It overlaps.
        (add("ab", 4), add("x", 0, 2), add("x", 0, 2)),
        (add("ab", 4), add("", LOST), add("", LOST)),
        (add("", LOST), add("x", 0), None),
    ],
)
def test_increments_that_wait_are_one(before: Increment | None, more: Increment, whole: Increment | None) -> None:
    """As a gateway would put them together."""
    assert joined(before, more) == whole


class NoChannel:
    """Redis that is never asked."""


def test_what_finds_no_room_is_dropped() -> None:
    """A Redis that stands still costs the worker a bounded amount of memory; the rest comes with the end."""
    outgoing = Outgoing(NoChannel())  # type: ignore[arg-type]
    for n in range(3):
        outgoing.add(IncrementTarget("g", "n"), add("x" * (MOST_CHARACTERS // 2), n * (MOST_CHARACTERS // 2)))

    assert outgoing.dropped == 1
    assert outgoing._characters == MOST_CHARACTERS


class Sent:
    """An outgoing that remembers."""

    def __init__(self) -> None:
        self.increments: list[tuple[str, Increment]] = []

    def add(self, address: IncrementTarget, increment: Increment) -> None:
        self.increments.append((address.gateway_id, increment))


def batch_streams() -> tuple[BatchStreams, Sent]:
    sent = Sent()
    requests = [ClaimedRequest(name, 1000, 2, b"") for name in "abc"]
    return BatchStreams(requests, sent), sent  # type: ignore[arg-type]


def test_pieces_find_their_request() -> None:
    """By their place in what the model runs, which need not be the whole batch; an address that is none is left alone."""
    streams, sent = batch_streams()
    streams.begin(["a", "c"], lambda _: None)

    streams.hear([Piece(1, "g n", 3, "x"), Piece(0, "nowhere", 0, "y"), Piece(9, "g n", 0, "z")])

    assert sent.increments == [("g", Increment("c", "n", 2, 3, "x"))]


def test_a_loss_is_told_to_those_who_have_heard_something() -> None:
    """Nobody else could know that it began."""
    streams, sent = batch_streams()
    streams.begin(["a", "b", "c"], lambda _: None)
    streams.hear([Piece(1, "g n", 0, "x")])

    streams.lost()
    streams.lost()

    assert sent.increments[1:] == [("g", Increment("b", "n", 2, LOST, ""))]


def test_who_left_is_dropped_once() -> None:
    """While the model runs it is told; before, they are not run at all; nobody is told twice."""
    streams, _ = batch_streams()
    requests = [ClaimedRequest(name, 1000, 2, b"") for name in "abc"]
    dropped: list[Any] = []

    streams.only(frozenset("bc"))
    waiting = [request.id for request in streams.waiting(requests)]
    streams.begin(waiting, dropped.append)
    streams.only(frozenset("b"))
    streams.only(frozenset("b"))
    streams.end()
    streams.only(frozenset())

    assert waiting == ["b", "c"]
    assert dropped == [[1]]
    assert streams.members == set()


class Writer:
    """A user's model that writes letter by letter."""

    def __init__(self) -> None:
        self.wanted: list[list[bool]] = []

    def predict(self, texts: list[str]) -> list[str]:
        return [text.upper() for text in texts]

    def generate(self, texts: list[str], tell: Any) -> list[str]:
        for letters in zip(*texts, strict=True):
            self.wanted.append(tell([letter.upper() for letter in letters]))
        return self.predict(texts)


def test_a_users_model_may_write_step_by_step() -> None:
    """`generate` is called where somebody reads along, and hears who does not any more."""
    ears, steps, model = Ears(), [], Writer()
    backend = FunctionBackend("m:Writer", model)
    backend.load()

    results = backend.run([Item("ab", listener=ears), Item("cd")], lambda: steps.append(None))
    ears.gone = True
    backend.run([Item("x", listener=ears)], lambda: None)
    unread = backend.run([Item("ab")], lambda: None)

    assert [result.output for result in results] == ["AB", "CD"]
    assert ears.heard == [(0, "A"), (1, "B"), (0, "X")]
    assert model.wanted == [[True, True], [True, True], [False]]
    assert len(steps) == 3
    assert unread[0].output == "AB"


@pytest.mark.parametrize("told", [["a"], ["a", 3], ["a", "\ud800"], 7])
def test_a_users_model_that_tells_nonsense_is_found_out(told: Any) -> None:
    """One text for each input, that UTF-8 can carry."""

    class Wrong(Writer):
        def generate(self, texts: list[str], tell: Any) -> list[str]:
            tell(told)
            return texts

    backend = FunctionBackend("m:Wrong", Wrong())
    backend.load()

    with pytest.raises((InvalidOutput, TypeError)):
        backend.run([Item("a", listener=Ears()), Item("b")], lambda: None)
