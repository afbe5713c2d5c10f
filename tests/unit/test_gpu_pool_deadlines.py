"""From the time that requests have left to the moment at which a backend may end them: before their process is ended."""

import math

import pytest

from gpu_pool.backend import Item, ItemResult, Listener
from gpu_pool.deadlines import deadlines
from gpu_pool.frames import Run
from gpu_pool.inputs import run_readable
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

    def nobody(_place: int, _stream: str) -> Listener:
        raise AssertionError

    run_readable([BODY, b"junk", BODY], run, nobody, [1.0, 2.0, 3.0])
    run_readable([BODY], run, nobody)

    assert [item.until for item in seen] == [1.0, 3.0, math.inf]
