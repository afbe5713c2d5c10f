"""The watchdog of a running batch, and the stall detector."""

import asyncio
import time
from typing import Any, cast

import pytest

from gpu_pool.model_process.handle import ModelProcess, PiecesCallback, ignore_pieces
from gpu_pool.model_process.launch import ModelLaunch
from gpu_pool.model_process.messages import Done
from gpu_pool.model_process.stall_detector import DOUBT_S, GAP_S, TICK_S, StallDetector
from gpu_pool.model_process.watchdog import ModelHung, run_watched
from scheduler.errors import TierlaneError

CAP_MS = 50.0
DONE = Done(1, 1.0, [])


class Model:
    """A model process whose answer the test sets."""

    def __init__(self) -> None:
        self.progresses = False
        self.on_pieces: PiecesCallback = ignore_pieces
        self.answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self.killed = 0

    async def run(self, _bodies: Any, _budget_ms: float, on_pieces: PiecesCallback, *_: Any) -> Done:
        self.on_pieces = on_pieces
        return await self.answer

    def give_up(self, error: TierlaneError) -> None:
        self.killed += 1
        if not self.answer.done():
            self.answer.set_exception(error)

    @property
    def progress_at(self) -> float:
        """The present while it progresses, however late the event loop is: then only the limits of the run apply."""
        return time.monotonic() if self.progresses else 0.0


async def started(model: Model, timeout_ms: float, left_ms: tuple[int, ...] = ()) -> "asyncio.Task[Done]":
    process = cast("ModelProcess", model)
    watched = run_watched(process, [b"x"], cap_ms=CAP_MS, timeout_ms=timeout_ms, budget_ms=CAP_MS, left_ms=left_ms)
    task = asyncio.create_task(watched)
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("answers", [True, False])
async def test_watchdog_allows_for_its_own_stall(answers: bool) -> None:
    """After the worker itself stood still, a batch gets one more cap: an answer is accepted, a hang still ends."""
    model = Model()
    task = await started(model, 10 * CAP_MS)
    if answers:
        asyncio.get_running_loop().call_later(CAP_MS / 2000, model.answer.set_result, DONE)

    time.sleep(GAP_S + 2 * CAP_MS / 1000)  # noqa: ASYNC251 - the event loop stalls, as after SIGSTOP

    if answers:
        assert await task is DONE
    else:
        with pytest.raises(ModelHung):
            await task
    assert model.killed == (not answers)


@pytest.mark.parametrize(
    ("streams", "deadline_caps", "answers"), [(True, 600, True), (True, 2, False), (False, 600, False)]
)
async def test_streams_are_limited_by_their_deadlines(streams: bool, deadline_caps: int, answers: bool) -> None:
    """A batch that writes streams may run beyond the timeout of a batch, but only one cap beyond its last deadline."""
    model = Model()
    model.progresses = True
    task = await started(model, 2 * CAP_MS, (deadline_caps * int(CAP_MS),))
    if streams:
        model.on_pieces([])

    if answers:
        await asyncio.sleep(4 * CAP_MS / 1000)
        model.answer.set_result(DONE)
        assert await task is DONE
    else:
        with pytest.raises(ModelHung):
            await task


def test_the_model_process_inherits_nothing_that_opens_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of Tierlane, passwords and URLs of Redis and PostgreSQL are removed from its environment; others remain."""
    hidden = {
        "TIERLANE_SERVICE_TOKEN": "token",
        "PGPASSWORD": "password",
        "REDISCLI_AUTH": "password",
        "CACHE": "rediss://user:password@host",
        "DATABASE_URL": "postgresql+asyncpg://user:password@host/lane",
    }
    for name, text in {**hidden, "HF_HOME": "/models"}.items():
        monkeypatch.setenv(name, text)

    environment = ModelLaunch("tiny", secrets={"OPENAI_API_KEY": "key"}).environment()

    assert hidden.keys() & environment.keys() == set()
    assert (environment["HF_HOME"], environment["OPENAI_API_KEY"]) == ("/models", "key")


@pytest.mark.parametrize(
    ("gaps", "later", "doubt"),
    [
        ([GAP_S - 0.01], 0.0, False),
        ([], GAP_S + 0.01, True),
        ([GAP_S + 0.01, TICK_S], 0.0, True),
        ([GAP_S + 0.01], DOUBT_S, False),
        ([5.0, TICK_S, TICK_S, TICK_S], 0.0, False),
    ],
)
def test_stall_detector(gaps: list[float], later: float, doubt: bool) -> None:
    """Doubt lasts from the stall until the socket was read; `gaps` are between ticks, `later` is after the last one."""
    now = [100.0]
    detector = StallDetector(lambda: now[0])
    for gap in gaps:
        now[0] += gap
        detector.tick()
    now[0] += later

    assert detector.in_doubt() is doubt
