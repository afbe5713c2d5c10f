"""The deadline sweep: one loop over all waiting requests, because a timer for each would cost more than the request.

Just before its deadline a request is ended in Redis, and the reply that stands is the answer: a result that is already
stored wins over the timeout. When Redis does not say in time, the client is told 504 all the same, and Redis that it was.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from gateway.cancels import CALL_SIZE, CancelCall, Cancels
from gateway.inference.pending import Waiter, Waiters
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.fault_log import log_fault
from scheduler.protocol.cancellation import Cancellation

TICK_S = 0.025
GRACE_S = 0.05  # How long Redis has to say what stands.
LEAD_S = 0.05  # So much before the deadline it is asked, or a machine with no time to spare would answer too late.


class DeadlineSweep:
    """Ends what is overdue among `waiters`. `clock` is monotonic seconds."""

    def __init__(
        self, waiters: Waiters, endings: CancelCall, cancels: Cancels, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._waiters = waiters
        self._endings = endings
        self._cancels = cancels
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self.overrun = 0  # Answered 504 because Redis did not say in time.

    async def run(self) -> None:
        """Sweep forever."""
        while True:
            await asyncio.sleep(TICK_S)
            self.sweep(self._clock())

    def sweep(self, now: float) -> None:
        """One look: settle what is newly due, answer what Redis was asked about too long ago.

        The grace counts from the asking: a process that stood still may be long past the deadline with the result there.
        """
        fresh: list[Waiter] = []
        for waiter in self._waiters.due(now + LEAD_S):
            if waiter.settling_since is None:
                fresh.append(waiter)
            elif waiter.settling_since + GRACE_S <= now and not waiter.future.done():
                self.overrun += 1
                self._answer(waiter, ErrorCode.DEADLINE_EXCEEDED)
        for group in _groups(fresh):
            self._begin(group, now)

    async def end_all(self, code: ErrorCode) -> None:
        """End all that wait with this code, as at their deadline: what is stored by then is the answer."""
        await asyncio.gather(*(self._settle(group, code) for group in _groups(self._waiters.all())))

    def _begin(self, group: Sequence[Waiter], now: float) -> None:
        for waiter in group:
            waiter.settling_since = now
        task = asyncio.get_running_loop().create_task(self._settle(group, ErrorCode.DEADLINE_EXCEEDED))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, group: Sequence[Waiter], code: ErrorCode) -> None:
        asked = [waiter for waiter in group if waiter.sent]
        try:
            replies = await self._endings.cancel([Cancellation(waiter.id, code, used=waiter.used) for waiter in asked])
            self._waiters.resolve_all(replies)
        except TierlaneError:
            pass  # It is told what the client was told when it is back.
        except Exception as error:  # noqa: BLE001  # no fault may end this loop
            log_fault("ending requests failed", error)
        for waiter in group:
            if not waiter.settled:  # Else its end is on its way to the disk, and is told within the grace.
                self._answer(waiter, code)

    def _answer(self, waiter: Waiter, code: ErrorCode) -> None:
        """Send this error where nothing else was sent. Redis may note another end at this moment, which then is revoked."""
        if waiter.future.done():
            return
        if waiter.sent:
            self._cancels.add(waiter.id, code, told=True, used=waiter.used)
        waiter.finish(code)


def _groups(waiters: Sequence[Waiter]) -> list[Sequence[Waiter]]:
    """What one call takes each."""
    return [waiters[start : start + CALL_SIZE] for start in range(0, len(waiters), CALL_SIZE)]
