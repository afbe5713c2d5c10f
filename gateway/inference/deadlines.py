"""Deadlines and cancellations of pending requests: one loop over all of them, since timers would cost more.

Just before its deadline a request is ended in Redis, and the reply that is stored then is the response: a result that
was stored earlier takes precedence over the timeout. If Redis does not respond in time, the client gets 504, and the
gateway reports this to Redis.

Cancellations are collected into one call. While Redis is unavailable they are kept and retried, bounded in number and
age. If one is lost, the scheduler ends the request at its deadline.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice

from gateway.inference.pending import PendingRequest, PendingRequests
from scheduler.bounded_dict import BoundedDict
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.cancellation import Cancellation, Terminations
from scheduler.tasks import next_tick

MAX_IDS = 10_000
CALL_SIZE = 256
KEEP_S = 600.0  # As long as a request may live: then the scheduler has ended it.
RETRY_S = 0.25

TICK_S = 0.025
GRACE_S = 0.05  # Time that Redis has to return the final reply.
LEAD_S = 0.05  # Redis is called this long before the deadline, or a busy machine would respond too late.


class Cancellations:
    """Request ids to cancel, each with its error code. `clock`: monotonic seconds."""

    def __init__(self, terminations: Terminations, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminations = terminations
        self._clock = clock
        self._ids: BoundedDict[str, tuple[Cancellation, float]] = BoundedDict(MAX_IDS)
        self._wake = asyncio.Event()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._ids)

    def add(
        self, request_id: str, code: ErrorCode, *, running: bool = False, delivered: bool = False, used: int = 0
    ) -> None:
        """Queue a cancellation; the arguments are those of `Cancellation`.

        CANCELLED does not stop a request that runs, unless `running`. If there are too many, the oldest is dropped.
        """
        if len(self._ids) >= MAX_IDS and request_id not in self._ids:
            self.dropped += 1
        self._ids[request_id] = Cancellation(request_id, code, running, delivered, used), self._clock()
        self._wake.set()

    async def flush(self) -> bool:
        """Send the oldest cancellations in one call. Returns False if Redis is unavailable; then they are kept."""
        before = self._clock() - KEEP_S
        while self._ids and next(iter(self._ids.values()))[1] < before:
            del self._ids[next(iter(self._ids))]
            self.dropped += 1
        batch = [cancellation for cancellation, _ in islice(self._ids.values(), CALL_SIZE)]
        try:
            await self._terminations.cancel(batch)
        except TierlaneError:
            return False
        for cancellation in batch:
            if (kept := self._ids.get(cancellation.id)) is not None and kept[0] is cancellation:
                del self._ids[cancellation.id]
        return True

    async def run(self) -> None:
        """Flush whenever a cancellation was added; never returns."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._ids:
                flushed = False
                with LoggedFaults("cancelling requests failed"):
                    flushed = await self.flush()
                if not flushed:
                    await asyncio.sleep(RETRY_S)


class DeadlineSweep:
    """Ends overdue requests among `pending_requests`. `clock`: monotonic seconds."""

    def __init__(
        self,
        pending_requests: PendingRequests,
        terminations: Terminations,
        cancellations: Cancellations,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pending_requests = pending_requests
        self._terminations = terminations
        self._cancellations = cancellations
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self.overrun = 0  # 504 responses because Redis did not respond in time.

    async def run(self) -> None:
        """Sweep every TICK_S seconds; never returns."""
        while True:
            await next_tick(TICK_S)
            self.sweep(self._clock())

    def sweep(self, now: float) -> None:
        """One pass at `now` (monotonic seconds): end requests that are due in Redis, and answer those without a reply in time.

        The grace counts from the call: a process that was suspended may be past the deadline while the result is stored.
        """
        fresh: list[PendingRequest] = []
        for pending in self._pending_requests.due(now + LEAD_S):
            if pending.settling_since is None:
                fresh.append(pending)
            elif pending.settling_since + GRACE_S <= now and not pending.done:
                self.overrun += 1
                self._answer(pending, ErrorCode.DEADLINE_EXCEEDED)
        for group in _groups(fresh):
            self._begin(group, now)

    async def end_all(self, code: ErrorCode) -> None:
        """End all pending requests with this code, as at their deadline: a reply that is stored by then is the response."""
        await asyncio.gather(*(self._settle(group, code) for group in _groups(self._pending_requests.all())))

    def end_sent(self, code: ErrorCode, now: float) -> None:
        """End all requests that Redis may have, without waiting for their deadlines; otherwise as `end_all`."""
        sent = [
            pending
            for pending in self._pending_requests.all()
            if pending.sent and not pending.direct and pending.settling_since is None and not pending.done
        ]
        for group in _groups(sent):
            self._begin(group, now, code)

    def _begin(
        self, group: Sequence[PendingRequest], now: float, code: ErrorCode = ErrorCode.DEADLINE_EXCEEDED
    ) -> None:
        for pending in group:
            pending.settling_since = now
        task = asyncio.get_running_loop().create_task(self._settle(group, code))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, group: Sequence[PendingRequest], code: ErrorCode) -> None:
        # The cancellation that `_answer` queues is sent when Redis is back.
        with LoggedFaults("cancelling requests failed"), suppress(TierlaneError):
            replies = await self._terminations.cancel(
                [Cancellation(pending.id, code, used=pending.used) for pending in group if pending.sent]
            )
            self._pending_requests.resolve_all(replies)
        for pending in group:
            if not pending.settled:  # A direct-mode outcome that is being written to disk follows within the grace.
                self._answer(pending, code)

    def _answer(self, pending: PendingRequest, code: ErrorCode) -> None:
        """Finish the request with this error unless it is done. If Redis stores another outcome now, that one is revoked."""
        if pending.done:
            return
        if pending.sent:
            self._cancellations.add(pending.id, code, delivered=True, used=pending.used)
        pending.finish(code)


def _groups(pending_requests: Sequence[PendingRequest]) -> list[Sequence[PendingRequest]]:
    """Slices of at most CALL_SIZE."""
    return [pending_requests[start : start + CALL_SIZE] for start in range(0, len(pending_requests), CALL_SIZE)]
