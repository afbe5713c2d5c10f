"""Background tasks of one process: restarted when they end, and cancelled until they have ended.

A loop handles the errors that it expects. An unexpected error would end it silently, so the tasks of a role are started
here only: a task that ends is logged, reported and restarted.

One `cancel` is not sufficient on Python 3.11: the Redis client awaits its writes with `asyncio.wait_for`, which loses a
cancellation that arrives when the write completes (one in eight in a trial), and the loop would run for ever.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeAlias

from scheduler.fault_log import log_fault
from scheduler.redis_client.backoff import Backoff

Loop: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

REPORTED_S = 60.0
"""An end is reported for this time. It exceeds the longest pause between two starts, so that a task that ends repeatedly is
always reported."""

LONGEST_PAUSE_S = 5.0


_PHASE_S = random.random()  # Processes of one machine wake at different times.

AGAIN_S = 0.05


async def next_tick(period_s: float) -> None:
    """Sleep until the next multiple of `period_s`, so that the loops of all pools and cells of a process wake together.

    A wake-up of the process costs more than the work of an idle loop.
    """
    await asyncio.sleep(period_s - (asyncio.get_running_loop().time() - _PHASE_S) % period_s)


class EndedTask(NamedTuple):
    """A task that ended and was restarted: its name, the exception type ("" if it returned), the number of ends while it was
    reported, and the time of the last end (monotonic seconds).
    """

    name: str
    error: str
    times: int
    at: float

    def sentence(self) -> str:
        """The clause for health. It omits the exception's message, which may contain a customer's data."""
        why = f"ended with {self.error}" if self.error else "returned"
        often = "" if self.times == 1 else f", {self.times} times"
        return f"the task {self.name!r} {why}{often}"


class TaskRegistry:
    """The background tasks of one process. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[str, EndedTask] = {}

    @property
    def ended(self) -> tuple[EndedTask, ...]:
        """Tasks that ended within the last minute, the latest first."""
        since = self._clock() - REPORTED_S
        self._ended = {name: each for name, each in self._ended.items() if each.at > since}
        return tuple(sorted(self._ended.values(), key=lambda each: each.at, reverse=True))

    async def run_forever(self, name: str, loop: Loop, until: asyncio.Event | None = None) -> None:
        """Run `loop`, and restart it whenever it ends, unless `until` is set."""
        backoff = Backoff(0.05, LONGEST_PAUSE_S)
        while True:
            began = self._clock()
            error: BaseException | None = None
            try:
                await loop()
            except asyncio.CancelledError as cancelled:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                error = cancelled  # Raised by an awaited object; this task itself was not cancelled.
            except Exception as raised:  # noqa: BLE001 - after any error the task is restarted
                error = raised
            if until is not None and until.is_set():
                return
            log_fault("task_ended", error, task=name)
            before = {each.name: each.times for each in self.ended}
            kind = type(error).__name__ if error is not None else ""
            self._ended[name] = EndedTask(name, kind, before.get(name, 0) + 1, self._clock())
            if self._clock() - began > LONGEST_PAUSE_S:
                backoff.reset()
            await backoff.sleep()


async def end_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel every task repeatedly until all have ended; their exceptions are dropped."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
