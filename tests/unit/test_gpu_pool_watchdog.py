"""The watchdog of a batch: who hangs is killed at the cap, and a watcher that stood still itself kills nobody for it."""

import asyncio
import time
from typing import Any, cast

import pytest

from gpu_pool.model_process.handle import GAP_S, Hear, ModelHung, ModelProcess, hear_nothing, run_watched
from gpu_pool.model_process.messages import Done
from scheduler.errors import TierlaneError

CAP_MS = 50.0
ANSWER = Done(1, 1.0, [])


class Model:
    """A model process that answers when the test says so."""

    def __init__(self) -> None:
        self.progress_at = 0.0
        self.hear: Hear = hear_nothing
        self.answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self.given_up: list[TierlaneError] = []

    async def run(self, _bodies: Any, _budget_ms: float, hear: Hear, *_: Any) -> Done:
        self.hear = hear
        return await self.answer

    def give_up(self, error: TierlaneError) -> None:
        self.given_up.append(error)
        if not self.answer.done():
            self.answer.set_exception(error)


async def watched(model: Model) -> Done:
    process = cast("ModelProcess", model)
    return await run_watched(process, [b"x"], cap_ms=CAP_MS, timeout_ms=10 * CAP_MS, budget_ms=CAP_MS)


def stand_still(seconds: float) -> None:
    """Nothing of this process runs, as after SIGSTOP."""
    time.sleep(seconds)


async def test_an_answer_that_came_during_a_standstill_is_taken() -> None:
    """The cap is over by the clock, and the answer lies there unread: the model did nothing wrong."""
    model = Model()
    running = asyncio.create_task(watched(model))
    loop = asyncio.get_running_loop()
    loop.call_later(CAP_MS / 2000, model.answer.set_result, ANSWER)
    loop.call_soon(stand_still, GAP_S + 2 * CAP_MS / 1000)

    assert await running is ANSWER
    assert model.given_up == []


async def test_who_hangs_is_given_up_all_the_same() -> None:
    """One more cap after the standstill."""
    model = Model()
    running = asyncio.create_task(watched(model))
    asyncio.get_running_loop().call_soon(stand_still, GAP_S + 2 * CAP_MS / 1000)
    with pytest.raises(ModelHung):
        await running

    assert len(model.given_up) == 1


async def stepping(model: Model, running: "asyncio.Task[Done]", seconds: float, *, streams: bool) -> None:
    """The model shows progress for so long, and in streams where that is said."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not running.done():
        model.progress_at = time.monotonic()
        if streams:
            model.hear([])
        await asyncio.sleep(CAP_MS / 5000)


@pytest.mark.parametrize("streams", [True, False])
async def test_streams_are_bounded_by_their_deadlines(streams: bool) -> None:
    """A model that writes streams, step by step, is not killed for the time of one run; without them it is."""
    model = Model()
    process = cast("ModelProcess", model)
    running = asyncio.create_task(
        run_watched(process, [b"x"], cap_ms=CAP_MS, timeout_ms=2 * CAP_MS, budget_ms=CAP_MS, left_ms=[30 * int(CAP_MS)])
    )
    await asyncio.sleep(0)
    await stepping(model, running, 4 * CAP_MS / 1000, streams=streams)
    if streams:
        model.answer.set_result(ANSWER)
        assert await running is ANSWER
    else:
        with pytest.raises(ModelHung):
            await running


async def test_a_stream_past_its_deadline_ends_the_model() -> None:
    """A model that shows progress and ends nothing is killed one cap after the last deadline."""
    model = Model()
    process = cast("ModelProcess", model)
    running = asyncio.create_task(
        run_watched(process, [b"x"], cap_ms=CAP_MS, timeout_ms=CAP_MS, budget_ms=CAP_MS, left_ms=[2 * int(CAP_MS)])
    )
    await asyncio.sleep(0)
    await stepping(model, running, 5.0, streams=True)

    with pytest.raises(ModelHung):
        await running
