"""Endless tasks of one process: started again where they end, and cancelled until they have ended.

A loop guards itself against the faults that it knows. What it does not know would end it for good and in silence, so
the tasks of a role are started here and nowhere else: one that ends all the same is logged, reported and started again.

One `cancel` is not enough on Python 3.11: the Redis client awaits its writes with `asyncio.wait_for`, which loses a
cancellation that comes as the write completes (one in eight was lost in a trial), and the loop would go on for ever.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeAlias

from scheduler.fault_log import log_fault
from scheduler.redis_client.pipeline import Backoff

Loop: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

REPORTED_S = 60.0
"""An end is reported for so long: longer than the longest pause between two starts, so one that ends again and again is
always reported."""

LONGEST_PAUSE_S = 5.0


class EndedTask(NamedTuple):
    """A task that ended and was started again: its name, the type of the exception ("" where it returned), how often since
    it was last reported as well, and when it ended last (monotonic seconds).
    """

    name: str
    error: str
    times: int
    at: float

    def sentence(self) -> str:
        """What it is called in health: the fault, without its words, which may hold a customer's data."""
        why = f"ended with {self.error}" if self.error else "returned"
        often = "" if self.times == 1 else f", {self.times} times"
        return f"the task {self.name!r} {why}{often}"


class TaskRegistry:
    """The endless tasks of one process. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[str, EndedTask] = {}

    @property
    def ended(self) -> tuple[EndedTask, ...]:
        """Those that ended within the last minute, the latest first."""
        since = self._clock() - REPORTED_S
        self._ended = {name: each for name, each in self._ended.items() if each.at > since}
        return tuple(sorted(self._ended.values(), key=lambda each: each.at, reverse=True))

    async def run_forever(self, name: str, loop: Loop, until: asyncio.Event | None = None) -> None:
        """Run `loop` and start it again whenever it ends, but for an end after `until` was set."""
        backoff = Backoff(0.05, LONGEST_PAUSE_S)
        while True:
            began = self._clock()
            error: BaseException | None = None
            try:
                await loop()
            except asyncio.CancelledError as cancelled:
                if _is_cancelled():
                    raise
                error = cancelled  # Of something that it awaited: nobody wants this task to end.
            except Exception as raised:  # noqa: BLE001 - whatever it is, the task goes on
                error = raised
            if until is not None and until.is_set():
                return
            self._note(name, error)
            if self._clock() - began > LONGEST_PAUSE_S:
                backoff.reset()
            await backoff.sleep()

    def _note(self, name: str, error: BaseException | None) -> None:
        log_fault("task_ended", error, task=name)
        before = {each.name: each.times for each in self.ended}
        kind = type(error).__name__ if error is not None else ""
        self._ended[name] = EndedTask(name, kind, before.get(name, 0) + 1, self._clock())


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


AGAIN_S = 0.05


async def end_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel every task, again and again, until all have ended; what they raised is dropped."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
