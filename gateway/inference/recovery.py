"""The second witness: Redis may come back empty, or without its last writes, and this gateway still knows what it held.

On any sign of that (see witness_policy) the requests that wait here are submitted again under their ids, and the audit
records of the last seconds are sent again. One recovery runs at a time, and one a second: repeats are harmless, storms
are not. A request that had too little time left to be submitted again ends at its deadline like any other; Redis never
heard of it, so its records are sent when it ends.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import structlog

from gateway.audit_pairs import Pair
from gateway.cancels import Cancels
from gateway.inference.admission import ENTERED, AdmitCall, Limits, with_time_left
from gateway.inference.pending import Waiter, Waiters
from gateway.last_ends import LastEnds, outcome_of
from gateway.witness_policy import OTHER_EPOCH, Signs, candidates, worth_again
from scheduler.adoption import MAX_PAIRS
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import Submission, Verdict, calls_of
from scheduler.protocol.replies import Reply

log = structlog.get_logger("gateway")

PAUSE_S = 1.0  # Between two recoveries.
RETRY_S = 0.25  # After one that Redis did not let come to its end.
RESEND_EVERY_S = 4.0  # Audit records under one epoch: a Redis that comes and goes must not be given them each second.


class AdoptCall(Protocol):
    """`Adoption`, as far as the gateway uses it."""

    async def adopt(self, pairs: Sequence[Pair]) -> object: ...


class Witness:
    """Remembers, suspects, and tells Redis again. `clock` is monotonic seconds."""

    def __init__(
        self,
        *,
        waiters: Waiters,
        ends: LastEnds,
        admissions: AdmitCall,
        adoption: AdoptCall,
        limits: Callable[[], Limits],
        cancels: Cancels,
        p95_ms: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiters = waiters
        self._ends = ends
        self._admissions = admissions
        self._adoption = adoption
        self._limits = limits
        self._cancels = cancels
        self._p95_ms = p95_ms
        self._clock = clock
        self._signs = Signs()
        self._alarm = asyncio.Event()
        self._suspected = ""  # Why, until the requests that wait were looked at.
        self._resend = False  # The last records are to be sent again.
        self._resend_after = 0.0
        self._unsent: deque[Pair] = deque(maxlen=ends.max_pairs)
        self.recoveries = 0
        self.submitted_again = 0
        self.sent_again = 0

    def beat(self, epoch_us: int) -> None:
        """A heartbeat came through."""
        reason = self._signs.beat(epoch_us)
        if reason is not None:
            self.suspect(reason, at_once=reason == OTHER_EPOCH)
        elif not self._resend and not self._unsent:
            self._ends.forget_old()

    def missed(self) -> None:
        """A heartbeat failed."""
        self._signs.missed()

    def suspect(self, reason: str, *, at_once: bool = False) -> None:
        """Redis may have lost something; `at_once` where it has for sure."""
        self._suspected, self._resend = reason, True
        if at_once:
            self._resend_after = 0.0
        self._alarm.set()

    def ended(self, waiter: Waiter) -> None:
        """A request that was accepted has ended here."""
        pair = self._ends.note(waiter)
        if waiter.lost and not isinstance(outcome_of(waiter.future), Reply):
            self._unsent.append(pair)  # Redis does not know of it, and nobody else will say how it ended.
            self._alarm.set()

    async def run(self) -> None:
        """Recover whenever there is a sign of loss; never ends by itself."""
        while True:
            await self._alarm.wait()
            self._alarm.clear()
            await asyncio.sleep(await self._recovered())

    async def _recovered(self) -> float:
        """One recovery, to be gone on with where it did not come to its end. Returns the pause after it in seconds."""
        try:
            if not await self.recover():
                self._alarm.set()
            return PAUSE_S
        except TierlaneError as error:
            log.info("redis cannot be told again yet", reason=str(error))
        except Exception as error:  # noqa: BLE001  # no fault may end this loop
            log_fault("telling Redis again failed", error)
        self._alarm.set()
        return RETRY_S

    async def recover(self) -> bool:
        """One recovery. False where somebody is left to be submitted again; raises RedisUnavailable."""
        if self._suspected:
            log.warning("redis may have lost requests", reason=self._suspected, waiting=len(self._waiters))
            self._suspected = ""
            self.recoveries += 1
            for waiter in candidates(self._waiters.all()):
                waiter.lost = True
        await self._submit_again()
        self._take_up_ends()
        await self._send_ends()
        return not any(waiter.lost for waiter in candidates(self._waiters.all()) if self._in_time(waiter))

    async def _submit_again(self) -> None:
        limits = self._limits()
        chosen = worth_again(self._waiters.all(), limits.tiers, self._clock(), self._p95_ms())
        start = 0
        for piece in calls_of([waiter.submission for waiter in chosen]):
            # Some may have ended during the call before.
            group = [w for w in chosen[start : start + len(piece)] if not w.gone and not w.future.done()]
            start += len(piece)
            if not group:
                continue
            now = self._clock()
            submissions = [_again(waiter, now) for waiter in group]
            failpoint("loss_seen")
            verdicts = await self._admissions.admit(*limits[:2], submissions, *limits[2:])
            for waiter, verdict in zip(group, verdicts, strict=True):
                self._judged(waiter, verdict)

    def _judged(self, waiter: Waiter, verdict: Verdict) -> None:
        """Kept (again, or all the time): it waits on. Not kept for want of memory: it stays lost, and is tried again."""
        if verdict.outcome not in ENTERED:
            return
        waiter.lost = False
        self.submitted_again += 1
        if waiter.gone or waiter.future.done():
            told = waiter.told
            self._cancels.add(waiter.id, told or ErrorCode.CANCELLED, told=told is not None)

    def _take_up_ends(self) -> None:
        """Put the last records among those to send, or say when."""
        if not self._resend:
            return
        now = self._clock()
        if now < self._resend_after:
            asyncio.get_running_loop().call_later(self._resend_after - now, self._alarm.set)
            return
        self._resend, self._resend_after = False, now + RESEND_EVERY_S
        self._unsent = deque(self._ends.pairs(), maxlen=self._ends.max_pairs)  # What was owed is among them.

    async def _send_ends(self) -> None:
        while self._unsent:
            group = [self._unsent[index] for index in range(min(len(self._unsent), MAX_PAIRS))]
            await self._adoption.adopt(group)
            failpoint("ends_unnoted")
            self.sent_again += len(group)
            for _ in group:
                self._unsent.popleft()

    def _in_time(self, waiter: Waiter) -> bool:
        return waiter.deadline >= self._clock() + self._p95_ms() / 1000


def _again(waiter: Waiter, now: float) -> Submission:
    return msgspec.structs.replace(with_time_left(waiter, now), again=True)
