"""Endless tasks: a task that ends is restarted, and its end is recorded."""

import asyncio

import pytest

import scheduler.tasks
from eventually import eventually
from scheduler.tasks import REPORTED_S, TaskRegistry, end_all, next_tick


class Loop:
    """A loop that ends as `ends` say, one after the other, and then runs until it is cancelled."""

    def __init__(self, *ends: BaseException | None) -> None:
        self.ends = list(ends)
        self.runs = 0

    async def run(self) -> None:
        self.runs += 1
        if not self.ends:
            await asyncio.Event().wait()
        end = self.ends.pop(0)
        if end is not None:
            raise end


@pytest.mark.parametrize(
    ("end", "error"),
    [(ValueError("secret"), "ValueError"), (None, ""), (asyncio.CancelledError(), "CancelledError")],
)
async def test_a_loop_that_ends_is_restarted(end: BaseException | None, error: str) -> None:
    """Also after a cancellation of something else. The end is reported for a minute, without the text of the error."""
    now = 100.0
    registry, loop = TaskRegistry(lambda: now), Loop(end, end)
    task = asyncio.create_task(registry.run_forever("callbacks", loop.run))
    try:
        await eventually(lambda: loop.runs == 3, "the third run")
        (ended,) = registry.ended
        assert (ended.name, ended.error, ended.times, ended.at) == ("callbacks", error, 2, 100.0)
        assert "secret" not in ended.sentence()
    finally:
        await end_all([task])
    assert task.cancelled()
    assert len(registry.ended) == 1  # The cancellation by the owner is no unexpected end.
    now += REPORTED_S
    assert registry.ended == ()


async def test_a_requested_end_is_not_recorded() -> None:
    """A loop that returns after `until` was set is not restarted."""
    until, registry, loop = asyncio.Event(), TaskRegistry(), Loop(None)
    until.set()
    async with asyncio.timeout(5):
        await registry.run_forever("auditor", loop.run, until)

    assert (loop.runs, registry.ended) == (1, ())


async def test_loops_of_one_process_wake_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever each begins to wait, and also if one has a multiple of the other's period."""
    ends: list[float] = []

    async def sleep(seconds: float) -> None:
        ends.append(asyncio.get_running_loop().time() + seconds)

    monkeypatch.setattr("scheduler.tasks.asyncio.sleep", sleep)
    phase = scheduler.tasks._PHASE_S
    for period in (0.1, 0.1, 0.025, 0.25):
        before = asyncio.get_running_loop().time()
        await next_tick(period)
        periods = (ends[-1] - phase) / period
        assert abs(periods - round(periods)) < 0.05
        assert before < ends[-1]
