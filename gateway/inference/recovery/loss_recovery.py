"""Recovery after a loss in Redis: resubmit pending requests, and send recent audit records again.

A loss is only suspected: Redis has another epoch, or connections broke. A false alarm is cheap, since everything that is
sent again is idempotent by id. One recovery runs at a time, at most one per second. A request with too little time left
for a resubmission ends at its deadline; Redis has no record of it, so its audit records are sent when it ends.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from gateway.inference.admission import ENTERED, AdmissionLimits, with_time_left
from gateway.inference.audit_pairs import Pair
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import PendingRequest, PendingRequests
from gateway.inference.recovery.loss_signs import OTHER_EPOCH, LossSigns
from gateway.inference.recovery.recent_outcomes import RecentOutcomes
from gateway.inference.recovery.resubmission import candidates, to_resubmit
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import Admissions, calls_of
from scheduler.protocol.adoption import MAX_PAIRS, Adoption
from scheduler.protocol.replies import Reply

log = structlog.get_logger("gateway")

PAUSE_S = 1.0  # Between two recoveries.
RETRY_S = 0.25  # After a recovery that Redis interrupted.
RESEND_EVERY_S = 4.0  # Audit records under one epoch: an unstable Redis must not receive them each second.


class LossRecovery:
    """Detects a suspected loss, and resubmits requests and audit records. `clock`: monotonic seconds."""

    def __init__(
        self,
        *,
        pending_requests: PendingRequests,
        ends: RecentOutcomes,
        admissions: Admissions,
        adoption: Adoption,
        limits: Callable[[], AdmissionLimits],
        cancellations: Cancellations,
        p95_ms: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pending_requests = pending_requests
        self._ends = ends
        self._admissions = admissions
        self._adoption = adoption
        self._limits = limits
        self._cancellations = cancellations
        self._p95_ms = p95_ms
        self._clock = clock
        self._signs = LossSigns()
        self._alarm = asyncio.Event()
        self._suspected = ""  # The reason, until pending requests are marked as lost.
        self._resend = False  # Whether the kept records must be sent again.
        self._resend_after = 0.0
        self._unsent: deque[Pair] = deque(maxlen=ends.max_pairs)
        self.submitted_again = 0

    def heartbeat(self, epoch_us: int) -> None:
        """A heartbeat succeeded."""
        reason = self._signs.heartbeat(epoch_us)
        if reason is not None:
            self.suspect(reason, at_once=reason == OTHER_EPOCH)
        elif not self._resend and not self._unsent:
            self._ends.forget_old()

    def missed(self) -> None:
        """A heartbeat failed."""
        self._signs.missed()

    def unwritten(self, oldest_ms: int | None) -> None:
        """The oldest audit record in Redis is of this UNIX time; None: PostgreSQL has all."""
        self._ends.unwritten_ms = math.inf if oldest_ms is None else oldest_ms

    def suspect(self, reason: str, *, at_once: bool = False) -> None:
        """Redis may have lost data. `at_once`: it certainly has, so audit records are sent without delay."""
        self._suspected, self._resend = reason, True
        if at_once:
            self._resend_after = 0.0
        self._alarm.set()

    def ended(self, pending: PendingRequest) -> None:
        """An accepted request has ended at this gateway."""
        pair = self._ends.add(pending)
        if pending.lost and not isinstance(pending.outcome, Reply):
            self._unsent.append(pair)  # Redis has no record of it, so no other process reports its end.
            self._alarm.set()

    async def run(self) -> None:
        """Recover whenever there is a sign of loss; never returns."""
        while True:
            await self._alarm.wait()
            self._alarm.clear()
            await asyncio.sleep(await self._recovered())

    async def _recovered(self) -> float:
        """Run one recovery, and schedule another if it was incomplete. Returns the pause after it in seconds."""
        try:
            if not await self.recover():
                self._alarm.set()
            return PAUSE_S
        except TierlaneError as error:
            log.info("recovery after a loss in redis is delayed", reason=str(error))
        except Exception as error:  # noqa: BLE001  # no fault may end this loop
            log_fault("recovery after a loss in Redis failed", error)
        self._alarm.set()
        return RETRY_S

    async def recover(self) -> bool:
        """Run one recovery. Returns False if requests remain to be resubmitted. Raises RedisUnavailable."""
        if self._suspected:
            log.warning("redis may have lost requests", reason=self._suspected, waiting=len(self._pending_requests))
            self._suspected = ""
            for pending in candidates(self._pending_requests.all()):
                pending.lost = True
        await self._resubmit()
        self._queue_records()
        await self._send_records()
        last_start = self._clock() + self._p95_ms() / 1000
        waiting = candidates(self._pending_requests.all())
        return not any(pending.lost for pending in waiting if pending.deadline >= last_start)

    async def _resubmit(self) -> None:
        limits = self._limits()
        chosen = to_resubmit(self._pending_requests.all(), limits.tiers, self._clock(), self._p95_ms())
        start = 0
        for piece in calls_of([pending.submission for pending in chosen]):
            # Some may be done since the previous call.
            group = [w for w in chosen[start : start + len(piece)] if not w.gone and not w.done]
            start += len(piece)
            if not group:
                continue
            now = self._clock()
            submissions = [msgspec.structs.replace(with_time_left(pending, now), again=True) for pending in group]
            failpoint("loss_seen")
            verdicts = await self._admissions.admit(*limits[:2], submissions, *limits[2:])
            for pending, verdict in zip(group, verdicts, strict=True):
                if verdict.outcome not in ENTERED:  # Redis had no memory: it stays lost, and is resubmitted later.
                    continue
                pending.lost = False
                self.submitted_again += 1
                if pending.gone or pending.done:
                    code = pending.error_code
                    self._cancellations.add(pending.id, code or ErrorCode.CANCELLED, delivered=code is not None)

    def _queue_records(self) -> None:
        """Queue the kept records to be sent, or schedule this for later."""
        if not self._resend:
            return
        now = self._clock()
        if now < self._resend_after:
            asyncio.get_running_loop().call_later(self._resend_after - now, self._alarm.set)
            return
        self._resend, self._resend_after = False, now + RESEND_EVERY_S
        self._unsent = deque(self._ends.pairs(), maxlen=self._ends.max_pairs)  # Includes the unsent pairs.
        self._ends.unwritten_ms = 0.0  # Until the outbox is read again.

    async def _send_records(self) -> None:
        while self._unsent:
            group = [self._unsent[index] for index in range(min(len(self._unsent), MAX_PAIRS))]
            await self._adoption.adopt(group)
            failpoint("resent_records_kept")
            for _ in group:
                self._unsent.popleft()
