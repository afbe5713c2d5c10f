"""From the time that requests have left to the moment at which a backend may end them: before their process is ended."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import pytest

from gpu_pool.backends.backend import Item, ItemResult, OutputListener
from gpu_pool.backends.function import FunctionBackend, Tell
from gpu_pool.model_process.inputs import Listeners, deadlines, run_readable, stream_deadlines
from gpu_pool.model_process.messages import Run
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, encode_payload

BODY = encode_payload(Payload("m", "hello", {}))


@pytest.mark.parametrize(
    ("budget_ms", "left_ms", "expected"),
    [
        (3000, [500, 2000], [100.5, 102.0]),  # each by its own time
        (1000, [500, 5000], [100.5, 100.95]),  # none past the batch's, less what an answer takes to be sent
        (1000, [], [100.95, 100.95]),  # a direct caller may not say
        (1000, [0, -20], [100.0, 99.98]),
    ],
)
def test_an_item_may_be_ended_by_its_own_time_or_the_batch_s(
    budget_ms: int, left_ms: list[int], expected: list[float]
) -> None:
    """Whichever comes first, in seconds of the clock that said 100."""
    assert deadlines(Run(1, budget_ms, [BODY, BODY], left_ms), 100.0) == pytest.approx(expected)


def test_each_item_gets_its_own_deadline() -> None:
    """Past a body that cannot be read, too."""
    seen: list[Item] = []

    def run(items: object) -> list[ItemResult]:
        seen.extend(items)  # type: ignore[call-overload]
        return [ItemResult("x")] * 2

    def nobody(_place: int, _stream: str, _until: float) -> OutputListener:
        raise AssertionError

    run_readable([BODY, b"junk", BODY], run, nobody, [1.0, 2.0, 3.0])
    run_readable([BODY], run, nobody)

    assert [item.until for item in seen] == [1.0, 3.0, math.inf]


STREAM = encode_payload(Payload("m", "hello", {}, stream="g1 0123456789abcdef"))


class Reader:
    """A listener whose stream's time is over, or not."""

    def __init__(self, until: float, *, late: bool) -> None:
        self.until = until
        self.late = self.gone = late

    def say(self, offset: int, text: str) -> None:
        raise AssertionError


def test_a_stream_is_bounded_by_its_own_time() -> None:
    """Not by the longest run of a batch: the model is not ended for one that it writes for longer."""
    run = Run(1, 3000, [STREAM, BODY], [9000, 9000])
    seen: list[Item] = []

    def answered(items: Sequence[Item]) -> list[ItemResult]:
        seen.extend(items)
        return [ItemResult("x")] * 2

    run_readable(
        run.bodies,
        answered,
        lambda _place, _stream, until: Reader(until, late=False),
        deadlines(run, 100.0),
        stream_deadlines(run, 100.0),
    )

    assert [item.until for item in seen] == pytest.approx([108.9, 102.85])
    assert cast("Reader", seen[0].listener).until == pytest.approx(108.9)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (ItemResult("what was sent", 7), (ErrorCode.DEADLINE_EXCEEDED, 7)),
        (ItemResult("a model that counts nothing", 0), (ErrorCode.DEADLINE_EXCEEDED, 8)),  # (5 + 27) / 4
        (ItemResult("", 7), (ErrorCode.DEADLINE_EXCEEDED, 0)),  # Nothing was sent, so nothing is charged.
        (ItemResult("", 0, ErrorCode.POISON_REQUEST), (ErrorCode.POISON_REQUEST, 0)),
    ],
)
def test_a_stream_that_ran_out_of_time_says_what_it_used(result: ItemResult, expected: tuple[str, int]) -> None:
    """It is a failure, but what was delivered is the client's."""
    (ended,) = run_readable([STREAM], lambda _: [result], lambda _place, _stream, until: Reader(until, late=True))

    assert (ended.error_code, ended.tokens_used) == expected


def test_a_listener_is_late_once_its_time_is_over() -> None:
    """Only where the item has no end by then, which is when a backend asks, and where its client is still there."""
    now = [1.0]
    listeners = Listeners(lambda _: None, lambda: now[0])
    listeners.begin(1)
    stays, leaves = listeners.listen(0, "g n", 2.0), listeners.listen(1, "g n", 2.0)
    assert not stays.gone
    listeners.drop(1, [1])
    now[0] = 2.0

    assert (stays.gone, stays.late) == (True, True)
    assert (leaves.gone, leaves.late) == (True, False)


def test_a_model_that_goes_on_for_nobody_is_ended() -> None:
    """Its `tell` raises once no text is wanted, past handlers of errors; what was told is the answer."""
    reader = Reader(1.0, late=False)
    heard: list[str] = []
    reader.say = lambda _offset, text: heard.append(text)  # type: ignore[method-assign]

    class Stubborn:
        def predict(self, texts: list[str]) -> list[str]:
            raise AssertionError

        def generate(self, texts: list[str], tell: Tell) -> list[str]:
            with suppress(Exception):
                tell(["a"])
                reader.gone = reader.late = True
                while True:
                    tell(["b"])
            raise AssertionError

    backend = FunctionBackend("m:Stubborn", Stubborn)
    backend.load()

    assert backend.run([Item("hello", listener=reader)], lambda: None) == [
        ItemResult("ab")
    ]  # "b" brought the news, and the next one the end
    backend.close()
