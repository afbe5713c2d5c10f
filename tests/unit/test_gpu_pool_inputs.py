"""Inputs of a batch in the model process: decoding, deadlines, and the stream listeners."""

from collections.abc import Sequence
from zlib import crc32

import pytest

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.model_process.inputs import deadlines, in_time, read_items, run_readable
from gpu_pool.model_process.listeners import AT_ONCE_S, PIECES_EVERY_S, Listeners
from gpu_pool.model_process.messages import Piece, Pieces, Run
from scheduler.payload import Payload, Task, decode_payload, encode_payload

BODY = encode_payload(Payload("m", "hello", {}))
STREAM = encode_payload(Payload("m", "hello", {}, stream="g1 0123456789abcdef"))


class Listener:
    """A listener that accepts no text; `late` when its time is over."""

    def __init__(self, *, late: bool = False) -> None:
        self.late = self.gone = late

    def emit(self, offset: int, text: str) -> None:
        raise AssertionError


def test_item_has_all_stored_fields() -> None:
    """A body that cannot be decoded is None at its position."""
    stored = decode_payload(Payload("m", "hello", {"seed": 1}, Task.CHAT).encode_for("", 3, "c"))

    item, unreadable = read_items(Run(1, 10_000, [encode_payload(stored), b"junk"]), lambda *_: Listener(), 5.0)

    assert unreadable is None
    assert item == Item("hello", {"seed": 1}, Task.CHAT, None, 14.5, 3, None, crc32(b"c"))


@pytest.mark.parametrize(
    ("left_ms", "expected"), [([500, 5000], [100.5, 100.95]), ([], [100.95, 100.95]), ([0, -20], [100.0, 99.98])]
)
def test_deadline_is_the_item_s_or_the_batch_s(left_ms: list[int], expected: list[float]) -> None:
    """Whichever comes first, at clock 100, with 95 % of a budget of 1 s."""
    assert deadlines(Run(1, 1000, [BODY, BODY], left_ms), 100.0) == pytest.approx(expected)


def test_stream_deadline_does_not_depend_on_the_batch_budget() -> None:
    """A stream is limited by its own time; other items by the batch budget, also if their own times are unknown."""
    run, items = Run(1, 3000, [STREAM, b"junk", BODY], [9000, 9000, 9000]), list[Item]()
    listened: list[float] = []

    def model(found: Sequence[Item]) -> list[ItemResult]:
        items.extend(found)
        return [ItemResult("x")] * len(found)

    def listen(_place: int, _stream: str, until: float) -> Listener:
        listened.append(until)
        return Listener()

    results = run_readable(run, model, listen, 100.0)
    run_readable(Run(2, 3000, [BODY]), model, listen, 200.0)

    assert [result.error_code for result in results] == ["", "invalid_request", ""]
    assert [item.until for item in items] == pytest.approx([108.9, 102.85, 202.85])
    assert listened == pytest.approx([108.9])


@pytest.mark.parametrize(
    ("result", "code", "tokens"),
    [
        (ItemResult("sent", 7), "deadline_exceeded", 7),
        (ItemResult("x" * 27, 0), "deadline_exceeded", 8),  # (5 + 27) / 4
        (ItemResult("", 7), "deadline_exceeded", 0),
        (ItemResult("", 0, "poison_request"), "poison_request", 0),
    ],
)
def test_late_stream_is_charged_for_what_was_sent(result: ItemResult, code: str, tokens: int) -> None:
    """The stream fails; delivered tokens are charged, and nothing is charged if nothing was delivered."""
    (late,) = run_readable(Run(1, 3000, [STREAM]), lambda _: [result], lambda *_: Listener(late=True), 100.0)

    assert (late.error_code, late.tokens_used) == (code, tokens)


def test_late_stream_without_a_text_is_free() -> None:
    """Of a request that is passed on, a line with a role alone was sent; its image is not a text."""
    image = (
        '{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:' + "A" * 4000 + '"}}]}]}'
    )
    item = Item(image, task=Task.CHAT_DOCUMENT, listener=Listener(late=True))

    late = in_time(item, ItemResult('{"choices":[{"delta":{"role":"assistant"}}]}\n'))

    assert (late.error_code, late.tokens_used) == ("deadline_exceeded", 0)


@pytest.mark.parametrize(
    ("payload", "rejected"),
    [
        (Payload("m", "hello", {"dimensions": 2}, Task.EMBED), "parameters.dimensions is not a parameter"),
        (Payload("m", "hello", {}, Task.EMBED), ""),
        (Payload("m", "hello", {"style": "x"}), ""),
    ],
)
def test_backend_without_a_rule_of_its_own_takes_no_parameters_of_embeddings(payload: Payload, rejected: str) -> None:
    """They are rejected by name before the backend gets them; those of texts it checks itself."""
    run = Run(1, 3000, [encode_payload(payload)])

    (result,) = run_readable(run, lambda items: [ItemResult("x")] * len(items), lambda *_: Listener(), 100.0)

    assert (result.error_code, result.output[: len(rejected)]) == (
        ("invalid_request", rejected) if rejected else ("", "")
    )


class Steps:
    """Listeners with a settable clock, and the frames that they sent."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[Pieces] = []
        self.listeners = Listeners(self.sent.append, PIECES_EVERY_S, lambda: self.now)
        self.listeners.begin(7)

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.listeners.flush()


def test_dropped_and_late_listeners() -> None:
    """A client that left is gone, not late, and gets no pieces; a drop that names another batch is ignored."""
    steps = Steps()
    stays, leaves = steps.listeners.listen(0, "g n", 101.0), steps.listeners.listen(1, "g n", 101.0)
    steps.listeners.drop(6, [0])
    steps.listeners.drop(7, [1, 5])
    assert (stays.gone, leaves.gone) == (False, True)
    leaves.emit(0, "x")
    steps.step(1)

    assert (stays.gone, stays.late) == (True, True)
    assert (leaves.gone, leaves.late, steps.sent) == (True, False, [])


def test_first_piece_is_sent_at_once_and_later_ones_together() -> None:
    """After the first piece of an item there is at most one frame in PIECES_EVERY_S."""
    steps = Steps()
    a, b = steps.listeners.listen(0, "g n1"), steps.listeners.listen(3, "g n2")

    a.emit(0, "x")
    b.emit(0, "y")
    steps.step(0)
    a.emit(1, "1")
    steps.step(PIECES_EVERY_S / 4)
    a.emit(2, "2")
    steps.step(PIECES_EVERY_S)
    steps.step(PIECES_EVERY_S)

    assert steps.sent == [
        Pieces(7, [Piece(0, "g n1", 0, "x"), Piece(3, "g n2", 0, "y")]),
        Pieces(7, [Piece(0, "g n1", 1, "12")]),
    ]


def test_item_that_runs_again_starts_at_zero() -> None:
    """Its first piece is sent at once."""
    steps = Steps()
    listener = steps.listeners.listen(0, "g n")
    listener.emit(0, "x")
    steps.step(0)
    listener.emit(1, "lost")
    listener.emit(0, "x")
    steps.step(0)

    assert steps.sent[1:] == [Pieces(7, [Piece(0, "g n", 0, "x")])]


def test_requests_with_slots_send_text_when_it_comes() -> None:
    """All text between two steps is one frame, without a wait; a request that ended or left sends nothing more."""
    sent = list[Pieces]()
    listeners = Listeners(sent.append, AT_ONCE_S, lambda: 100.0)
    a, b, c = (listeners.listen(seq, f"g n{seq}") for seq in (4, 5, 9))

    a.emit(0, "x")
    b.emit(0, "y")
    listeners.flush()
    a.emit(1, "1")
    b.emit(1, "2")
    c.emit(0, "3")
    listeners.drop(0, [5])
    listeners.end(9)
    listeners.drop(0, [9])
    listeners.flush()
    listeners.flush()

    assert sent == [
        Pieces(0, [Piece(4, "g n4", 0, "x"), Piece(5, "g n5", 0, "y")]),
        Pieces(0, [Piece(4, "g n4", 1, "1")]),
    ]
    assert (a.sent, c.sent, b.gone, len(listeners)) == (True, False, True, 2)
