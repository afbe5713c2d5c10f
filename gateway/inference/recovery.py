"""Recovery after a loss in Redis: resubmit pending requests, and send recent audit records again.

A loss is only suspected: Redis has another epoch, or connections broke. A false alarm is cheap, since everything that is
sent again is idempotent by id. One recovery runs at a time, at most one per second. A request with too little time left
for a resubmission ends at its deadline; Redis has no record of it, so its audit records are sent when it ends.

The audit records of recent requests are kept in a ring buffer of bounded length; old ones are dropped only while Redis
is healthy, and once PostgreSQL has them: while it is not available, Redis may have the only other copy. A pair is built
once for each accepted request, without its body and output, in about a microsecond.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
import structlog

from gateway.inference.admission import ENTERED, AdmissionLimits, with_time_left
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import Outcome, PendingRequest, PendingRequests
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import Admissions, TierLimit, Verdict, calls_of
from scheduler.protocol.adoption import MAX_PAIRS, Adoption
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord
from scheduler.protocol.replies import Reply, StoredReply
from scheduler.request_id import created_ms
from scheduler.states import State

OTHER_EPOCH = "its epoch changed"
UNAVAILABLE = "it was unavailable"


class LossSigns:
    """Signs of a loss, from heartbeats."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._missed = False

    def heartbeat(self, epoch_us: int) -> str | None:
        """A heartbeat succeeded. Returns the reason why Redis may have lost data, or None."""
        reason = None
        if self._epoch is not None and epoch_us != self._epoch:
            reason = OTHER_EPOCH
        elif self._missed:
            reason = UNAVAILABLE
        self._epoch, self._missed = epoch_us, False
        return reason

    def missed(self) -> None:
        """A heartbeat failed."""
        self._missed = True


def candidates(waiting: Iterable[PendingRequest]) -> list[PendingRequest]:
    """Requests that Redis may have lost, including those of a call in progress, which may have run before the loss.

    Requests in direct mode are included, since they may be returned to Redis.
    """
    return [pending for pending in waiting if pending.sent and not pending.done]


def to_resubmit(
    waiting: Iterable[PendingRequest], tiers: Sequence[TierLimit], now: float, p95_ms: float
) -> list[PendingRequest]:
    """Requests to resubmit now: accepted, possibly lost, and with time left for a run of `p95_ms`.

    Highest tier first, in each tier the nearest deadline first. The others end at their deadline. `now`: monotonic
    seconds.
    """
    rank = {tier.name: len(tier.ahead) for tier in tiers}  # `ahead` holds the tier itself and all above it.
    last_start = now + p95_ms / 1000
    chosen = [
        pending
        for pending in waiting
        if pending.lost
        and pending.accepted
        and not pending.direct
        and not pending.gone
        and not pending.done
        and pending.deadline >= last_start
        and pending.submission.tier in rank
    ]
    chosen.sort(key=lambda pending: (rank[pending.submission.tier], pending.deadline))
    return chosen


Pair = tuple[AcceptedRecord, EndedRecord]
SpoolEntry = tuple[AcceptedRecord, EndedRecord | None]
"""A pair, or the accepted record alone of a request that has not ended."""


def audit_pair(gateway_id: str, pending: PendingRequest, outcome: Outcome | None, now: float, mode: str) -> Pair:
    """The records of a request that ended with `outcome`; None if the client left and no response was delivered.

    `now` is monotonic seconds, `mode` that of `EndedRecord`. A rejection (a Verdict) has no records.
    """
    latency_ms = (now - pending.started) * 1000
    # The time in the id plus the time elapsed on this host since then: Redis TIME may not be available.
    ended_at_ms = created_ms(pending.id) + int((now - pending.created) * 1000)
    if isinstance(outcome, Reply):
        return accepted_record(gateway_id, pending), _ended_record(outcome, ended_at_ms, latency_ms, mode)
    delivered = isinstance(outcome, ErrorCode)
    code = outcome if isinstance(outcome, ErrorCode) else ErrorCode.CANCELLED
    ended = EndedRecord(
        pending.id, State.FAILED, code, ended_at_ms, latency_ms, -1, -1, "", 0, "", 0, 0, 0, mode, delivered
    )
    return accepted_record(gateway_id, pending), ended


def accepted_record(gateway_id: str, pending: PendingRequest) -> AcceptedRecord:
    """The record of the acceptance of a request."""
    s = pending.submission
    return AcceptedRecord(
        s.id, s.customer_id, s.api_key_id, s.tier, s.model, gateway_id, s.input_bytes, s.trace_id, s.endpoint
    )


def replayed_pair(gateway_id: str, pending: PendingRequest, stored: StoredReply) -> Pair:
    """The records of the stored request whose reply the client of `pending` received: same customer, key and input.

    If the end is not stored, it is estimated from the time in the queue and on the GPU.
    """
    reply, ended_ms = stored
    began_ms = created_ms(reply.id)
    if ended_ms is None:
        ended_ms = began_ms + int(max(0.0, reply.queue_ms) + max(0.0, reply.gpu_ms))
    accepted = msgspec.structs.replace(accepted_record(gateway_id, pending), id=reply.id)
    return accepted, _ended_record(reply, ended_ms, float(max(0, ended_ms - began_ms)), "queue")


def _ended_record(reply: Reply, ended_at_ms: int, latency_ms: float, mode: str) -> EndedRecord:
    output = reply.output
    return EndedRecord(
        reply.id,
        reply.state,
        reply.error_code,
        ended_at_ms,
        latency_ms,
        reply.queue_ms,
        reply.gpu_ms,
        reply.batch_id,
        reply.batch_size,
        reply.worker_id,
        reply.attempts,
        reply.tokens_used,
        len(output) if output.isascii() else len(output.encode()),
        mode,
        delivered=True,
        served_from=reply.served_from,
        cost_ms=reply.cost_ms,
    )


KEEP_S = 10.0  # A failover may lose the writes of this many seconds.
MAX_KEPT_PAIRS = 50_000  # About 35 MB; ten seconds of the highest throughput of one gateway.


class RecentOutcomes:
    """The ring buffer of audit records. `clock`: monotonic seconds."""

    def __init__(
        self, gateway_id: str, clock: Callable[[], float] = time.monotonic, max_pairs: int = MAX_KEPT_PAIRS
    ) -> None:
        self._gateway_id = gateway_id
        self._clock = clock
        self.max_pairs = max_pairs
        self._ring: deque[tuple[float, Pair]] = deque(maxlen=max_pairs)
        self.overwritten = 0  # Pairs dropped before KEEP_S because there were too many.
        self.unwritten_ms = math.inf  # UNIX time of the oldest audit record that PostgreSQL does not have.

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, pending: PendingRequest) -> Pair:
        """Build and keep the records of an accepted request that ended."""
        pair = audit_pair(self._gateway_id, pending, pending.outcome, self._clock(), "queue")
        self.keep([pair])
        return pair

    def keep(self, pairs: Iterable[Pair]) -> None:
        """Keep pairs that were just sent to Redis."""
        now = self._clock()
        for pair in pairs:
            if len(self._ring) == self.max_pairs and now - self._ring[0][0] <= KEEP_S:
                self.overwritten += 1
            self._ring.append((now, pair))

    def forget_old(self) -> None:
        """Drop pairs older than KEEP_S that PostgreSQL has. To be called while Redis certainly has the others."""
        before, written_ms = self._clock() - KEEP_S, self.unwritten_ms - KEEP_S * 1000  # Clocks may differ by KEEP_S.
        while self._ring and self._ring[0][0] < before and self._ring[0][1][1].ended_at_ms < written_ms:
            self._ring.popleft()

    def pairs(self) -> list[Pair]:
        """All kept pairs, oldest first."""
        return [pair for _, pair in self._ring]


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
        return not any(pending.lost for pending in candidates(self._pending_requests.all()) if self._in_time(pending))

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
                self._judged(pending, verdict)

    def _judged(self, pending: PendingRequest, verdict: Verdict) -> None:
        """If it is stored, it stays pending. If Redis had no memory, it stays lost, and is resubmitted later."""
        if verdict.outcome not in ENTERED:
            return
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

    def _in_time(self, pending: PendingRequest) -> bool:
        return pending.deadline >= self._clock() + self._p95_ms() / 1000
