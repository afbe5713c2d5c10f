"""Endless tasks: one that ends is started again, and health says so."""

import asyncio
from typing import Any

import pytest

from eventually import eventually
from gateway.operations.health_losses import ended_tasks
from scheduler.protocol.pool_view import GatewayStats, Observation
from scheduler.tasks import REPORTED_S, EndedTask, TaskRegistry


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
async def test_a_loop_that_ends_is_started_again(end: BaseException | None, error: str) -> None:
    """However it ends, even by a cancellation that was not its own; its end is remembered without its words."""
    registry, loop = TaskRegistry(), Loop(end, end)
    task = asyncio.create_task(registry.run_forever("callbacks", loop.run))
    try:
        await eventually(lambda: loop.runs == 3, "it runs for the third time")
        (ended,) = registry.ended
        assert (ended.name, ended.error, ended.times) == ("callbacks", error, 2)
        assert "secret" not in ended.sentence()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert len(registry.ended) == 1  # To be cancelled is no unexpected end.


async def test_an_end_that_was_asked_for_is_none() -> None:
    """A loop with an end of its own ends when that was asked for, and is not started again."""
    until, registry = asyncio.Event(), TaskRegistry()
    until.set()
    loop = Loop(None)
    async with asyncio.timeout(5):
        await registry.run_forever("auditor", loop.run, until)

    assert (loop.runs, registry.ended) == (1, ())


async def test_an_end_is_reported_for_a_minute() -> None:
    """Then nothing is wrong any more."""
    now = 100.0
    registry, loop = TaskRegistry(lambda: now), Loop(ValueError())
    task = asyncio.create_task(registry.run_forever("beat", loop.run))
    try:
        await eventually(lambda: loop.runs == 2, "it was started again")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert registry.ended == (EndedTask("beat", "ValueError", 1, 100.0),)
    now += REPORTED_S
    assert registry.ended == ()


def seen(**changes: Any) -> Observation:
    return Observation(0, {}, [], [], 0, 0, 0, 0, **changes)


def test_health_names_the_task_and_the_process() -> None:
    """Of this gateway, of another one, and of a scheduler; what this gateway published itself is not told twice."""
    own = EndedTask("callbacks", "UnicodeError", 3, 0.0)
    others = [GatewayStats(name, 0.0, {}, ended_tasks=["the task 'beat' returned"]) for name in ("g1", "g2")]
    looked = Observation(0, {}, [], others, 0, 0, 0, 0, notices=["scheduler s-1: the task 'dispatcher' returned"])
    found = ended_tasks((own,), looked, "g1")

    assert (found.level, found.value) == ("degraded", 3)
    assert found.reason is not None
    assert (
        "this gateway: the task 'callbacks' ended with UnicodeError, 3 times; gateway g2: the task 'beat'"
        in found.reason
    )
    assert "scheduler s-1: the task 'dispatcher' returned. The log line" in found.reason


def test_health_says_nothing_while_all_tasks_run() -> None:
    """The check is there all the same."""
    assert ended_tasks((), seen(), "g1").level == "healthy"
    assert ended_tasks((), None, "g1").level == "healthy"
