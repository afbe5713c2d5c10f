"""The model process's loop for backends with slots, with a scripted backend and a settable clock."""

from collections.abc import Callable
from typing import Any

import pytest

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.model_process.device_errors import DeviceLost
from gpu_pool.model_process.messages import Done, Drop, Piece, Pieces, Progress, Refused, Run, Slots, Withdraw
from gpu_pool.model_process.stepping import SlotServing
from scheduler.payload import Payload, encode_payload


class AcceleratorError(RuntimeError):
    """As torch's, after which a device is lost."""


class Backend:
    """Writes its input letter by letter; `!` raises, `m` needs memory for more than two items, `?` fails its item."""

    version = "scripted"
    slots = 4

    def __init__(self) -> None:
        self.items: dict[int, tuple[Item, str]] = {}
        self.healthy = True
        self.steps: list[str] = []

    def load(self) -> None: ...

    warmup = close = load

    def health(self) -> None:
        if not self.healthy:
            raise OSError

    def run(self, items: Any, progress: Callable[[], None]) -> list[ItemResult]:
        raise AssertionError

    def add(self, key: int, item: Item) -> None:
        if item.input == "unusable":
            raise ValueError
        self.items[key] = item, ""

    def remove(self, key: int) -> int:
        return len(self.items.pop(key)[1])

    def step(self, progress: Callable[[], None]) -> list[tuple[int, ItemResult | BaseException]]:
        progress()
        self.steps.append("".join(sorted(item.input[0] for item, _ in self.items.values())))
        ended: list[tuple[int, ItemResult | BaseException]] = []
        for key, (item, text) in self.items.items():
            error = self.error(item.input[len(text)])
            if error is not None:
                self.items.clear()
                raise error
            written = item.input[: len(text) + 1]
            self.items[key] = item, written
            if item.listener is not None:
                item.listener.emit(len(text), written[-1])
            if written[-1] == "?":
                ended.append((key, ValueError()))
            elif written == item.input or (item.listener is not None and item.listener.gone):
                ended.append((key, ItemResult(written, len(written))))
        for key, _ in ended:
            del self.items[key]
        return ended

    def error(self, letter: str) -> BaseException | None:
        if letter == "m" and len(self.items) > 2:
            return RuntimeError("CUDA out of memory")
        return {"!": ValueError(), "#": AcceleratorError("CUDA error"), "x": SystemExit()}.get(letter)


class Serving(SlotServing):
    """With the messages that it sent, without Progress."""

    def __init__(self, slots: int = 4) -> None:
        self.sent: list[Any] = []
        self.now = 100.0
        self.backend = Backend()
        super().__init__(self._record, self.backend, slots, lambda: self.now)

    def _record(self, message: Any) -> None:
        if not isinstance(message, Progress):
            self.sent.append(message)

    def run(self, seq: int, *texts: str, stream: str = "", left_ms: int = 9000) -> None:
        bodies = [encode_payload(Payload("m", text, {}, stream=stream)) for text in texts]
        self.take(Run(seq, 10_000, bodies, [left_ms] * len(texts)))

    def finish(self) -> list[Any]:
        """Step until nothing is left; the results by seq, in order, or what else was sent."""
        for _ in range(100):
            if self.busy:
                self.step()
        assert not self.busy
        assert not self.backend.items
        return [_short(message) for message in self.sent if not isinstance(message, Pieces)]


def _short(message: Any) -> Any:
    if not isinstance(message, Done):
        return message
    return message.seq, *(result.error_code or result.output for result in message.results)


@pytest.fixture
def serving() -> Serving:
    return Serving()


def test_requests_end_one_by_one_and_others_take_their_slots() -> None:
    """At most two run; a shorter one that joined later ends first; an unreadable body has its result at once."""
    serving = Serving(slots=2)
    for seq, text in enumerate(["aaaa", "b", "cc", "d"], start=1):
        serving.run(seq, text)
    serving.take(Run(9, 1000, [b"junk"]))

    assert serving.finish() == [(9, "invalid_request"), (2, "b"), (3, "cc"), (1, "aaaa"), (4, "d")]
    assert serving.backend.steps == ["ab", "ac", "ac", "ad"]


def test_run_of_several_bodies_is_answered_as_a_whole(serving: Serving) -> None:
    """As a batch: results in order when the last one is there, pieces by position."""
    serving.run(3, "aaa", "b", "unusable", stream="g n")
    serving.step()
    serving.take(Drop(3, [0]))

    assert serving.finish() == [(3, "aa", "b", "poison_request")]
    assert serving.sent[0] == Pieces(3, [Piece(0, "g n", 0, "a"), Piece(1, "g n", 0, "b")])


def test_new_text_of_all_streams_is_one_frame(serving: Serving) -> None:
    """Sent at every step; the text of a step that ends a request is in its result."""
    serving.run(1, "ab", stream="g n1")
    serving.run(2, "cde", stream="g n2")

    serving.finish()

    assert serving.sent[0] == Pieces(0, [Piece(1, "g n1", 0, "a"), Piece(2, "g n2", 0, "c")])
    assert [_short(message) for message in serving.sent[1:]] == [
        (1, "ab"),
        Pieces(0, [Piece(2, "g n2", 1, "d")]),
        (2, "cde"),
    ]


def test_client_that_leaves_frees_its_slot(serving: Serving) -> None:
    """A stream ends with its text; another request at once, charged for its tokens; one that waits without any."""
    serving = Serving(slots=2)
    serving.run(1, "aaaa", stream="g n")
    serving.run(2, "bbbb")
    serving.run(3, "cccc")
    serving.run(4, "dddd", stream="g n")
    serving.step()
    for seq in (1, 2, 3, 4, 77):
        serving.take(Drop(seq, [0]))

    assert serving.finish() == [(2, "cancelled"), (3, "cancelled"), (4, ""), (1, "aa")]
    assert [message.results[0].tokens_used for message in serving.sent if isinstance(message, Done)] == [1, 0, 0, 2]


def test_withdrawal(serving: Serving) -> None:
    """Hands back requests without output, running or waiting; others run on and have their result."""
    serving = Serving(slots=2)
    serving.run(1, "aaa", stream="g n")
    serving.run(2, "bbb")
    serving.run(3, "ccc")
    serving.step()
    serving.take(Withdraw([1, 2, 3, 8]))

    withdrawn = "The request was withdrawn."
    assert serving.finish() == [Refused(2, withdrawn), Refused(3, withdrawn), (1, "aaa")]


@pytest.mark.parametrize("bad", ["a!", "!", "unusable", "a?", "ax"])
def test_poison_fails_alone(serving: Serving, bad: str) -> None:
    """At its first or a later step, by itself or with the whole step; the others and later requests complete."""
    for seq, text in enumerate(["aaaa", bad, "bbb", "cccccc"], start=1):
        serving.run(seq, text)
        if seq % 2:
            serving.step()
    serving.run(5, "eeeeeee", stream="g n")

    results = serving.finish()

    assert sorted(results) == [(1, "aaaa"), (2, "poison_request"), (3, "bbb"), (4, "cccccc"), (5, "eeeeeee")]


def test_new_requests_wait_for_suspects_only(serving: Serving) -> None:
    """Once the culprit is found, the others that ran with it run again together with new ones."""
    serving.run(1, "aaaa")
    serving.step()
    serving.run(2, "!")
    serving.step()
    serving.run(3, "cc")

    assert serving.finish() == [(2, "poison_request"), (3, "cc"), (1, "aaaa")]
    assert serving.backend.steps == ["a", "!a", "!", "ac", "ac", "a", "a"]


def test_request_waits_no_longer_than_its_deadline(serving: Serving) -> None:
    """While suspects run."""
    for seq in (1, 2):
        serving.run(seq, "aaa!")
    for _ in range(4):
        serving.step()
    serving.run(3, "ccc", left_ms=500)
    serving.step()
    serving.now += 1
    serving.step()

    assert (3, "gpu_timeout") in serving.finish()


def test_out_of_memory_halves_the_slots(serving: Serving) -> None:
    """Requests with output go on, those without that do not fit are handed back; all others complete."""
    for seq, text in enumerate(["amm", "bmm", "cmm", "dmm"], start=1):
        serving.run(seq, text, stream="g n" if text[0] in "cd" else "")

    results = serving.finish()

    assert results[0] == Slots(2, "device memory")
    assert results[1:3] == [Refused(1, "device memory"), Refused(2, "device memory")]
    assert results[3:] == [(3, "cmm"), (4, "dmm")]


def test_lost_device_ends_the_process(serving: Serving) -> None:
    """Nothing is answered: the worker retries what ran."""
    serving.run(1, "aa")
    serving.run(2, "#")
    with pytest.raises(DeviceLost, match="AcceleratorError"):
        serving.step()
    assert serving.sent == []


def test_canary_runs_after_requests_without_a_good_answer(serving: Serving) -> None:
    """A model that fails fast would attract all work."""
    serving.backend.healthy = False
    for seq, text in enumerate(["!", "!", "a", "!", "!"], start=1):
        serving.run(seq, text)
        serving.finish()
    serving.run(6, "!")
    with pytest.raises(DeviceLost, match="canary"):
        serving.step()
