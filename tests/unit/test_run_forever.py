"""Endless tasks: a task that ends is restarted, and its end is recorded."""

import asyncio

import pytest

from eventually import eventually
from scheduler.tasks import REPORTED_S, TaskRegistry, end_all


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
