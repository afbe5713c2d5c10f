"""The watchdog of a batch: who hangs is killed at the cap, and a watcher that stood still itself kills nobody for it."""

import asyncio
import time
from typing import Any, cast

import pytest

from gpu_pool.frames import Done
from gpu_pool.model_handle import ModelProcess
from gpu_pool.standstill import GAP_S
from gpu_pool.watchdog import ModelHung, run_watched
from scheduler.errors import TierlaneError

CAP_MS = 50.0
ANSWER = Done(1, 1.0, [])


class Model:
    """A model process that answers when the test says so."""

    def __init__(self) -> None:
        self.progress_at = 0.0
        self.answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self.given_up: list[TierlaneError] = []

    async def run(self, *_: Any) -> Done:
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
