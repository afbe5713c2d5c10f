"""Recovery after a loss in Redis: waiting requests are submitted again, recent audit records are sent again.

Loss is suspected, never proved: Redis has another epoch, or connections broke. A false alarm is cheap, since everything
that is sent again is idempotent by id. One recovery runs at a time, at most one a second. A request with too little
time left to be submitted again ends at its deadline; Redis never heard of it, so its records are sent when it ends.

The audit records of recent requests are kept in a ring that is bounded in number; old ones are dropped only while Redis
is well. A pair is built once for each accepted request, without its body and output, in about a microsecond.
"""

import asyncio
import time
from asyncio import Future
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import structlog

from gateway.inference.admission import ENTERED, AdmitCall, Limits, with_time_left
from gateway.inference.deadlines import Cancels
from gateway.inference.pending import Ending, Outcome, Waiter, Waiters
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import MAX_PAIRS, Submission, TierLimit, Verdict, calls_of
from scheduler.protocol.audit_outbox import Accepted, Ended
from scheduler.protocol.replies import Reply
from scheduler.request_id import created_ms
from scheduler.states import State

OTHER_EPOCH = "it has another epoch"
AWAY = "it was away"


class Signs:
    """What heartbeats and the subscription tell of Redis."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._missed = False

    def beat(self, epoch_us: int) -> str | None:
        """A heartbeat came through. Returns why Redis may have lost something, or None."""
        reason = None
        if self._epoch is not None and epoch_us != self._epoch:
            reason = OTHER_EPOCH
        elif self._missed:
            reason = AWAY
        self._epoch, self._missed = epoch_us, False
        return reason

    def missed(self) -> None:
        """A heartbeat failed."""
        self._missed = True


def candidates(waiting: Iterable[Waiter]) -> list[Waiter]:
    """Those whom Redis held, or may be about to hold: a call under way may have been answered before the loss.

    Those who run past Redis too, since they may be left to it again.
    """
    return [waiter for waiter in waiting if waiter.sent and not waiter.future.done()]


def worth_again(waiting: Iterable[Waiter], tiers: Sequence[TierLimit], now: float, p95_ms: float) -> list[Waiter]:
    """Those to submit again now: accepted, not known to be kept, and with time left for a run of typical length.

    Highest tier first, in each tier the nearest deadline first. The others end at their deadline.
    """
    rank = {tier.name: len(tier.ahead) for tier in tiers}  # A tier has itself and all that are above it ahead.
    last_start = now + p95_ms / 1000
    chosen = [
        waiter
        for waiter in waiting
        if waiter.lost
        and waiter.accepted
        and not waiter.direct
        and not waiter.gone
        and not waiter.future.done()
        and waiter.deadline >= last_start
        and waiter.submission.tier in rank
    ]
    chosen.sort(key=lambda waiter: (rank[waiter.submission.tier], waiter.deadline))
    return chosen


Pair = tuple[Accepted, Ended]
Note = tuple[Accepted, Ended | None]
"""A pair, or the beginning alone of what has not ended yet."""


def audit_pair(gateway_id: str, waiter: Waiter, outcome: Outcome | None, now: float, mode: str) -> Pair:
    """The records of a request that ended with `outcome`; None: nobody was told, because the client left.

    `now` is monotonic seconds, `mode` that of `Ended`. A refusal has no records, and must not be asked for.
    """
    latency_ms = (now - waiter.started) * 1000
    # The id's own time plus what passed on this host, since Redis may not be there to tell it.
    ended_at_ms = created_ms(waiter.id) + int(latency_ms)
    if isinstance(outcome, Reply):
        return beginning(gateway_id, waiter), _told(outcome, ended_at_ms, latency_ms, mode)
    told = isinstance(outcome, ErrorCode)
    code = outcome if isinstance(outcome, ErrorCode) else ErrorCode.CANCELLED
    ended = Ended(waiter.id, State.FAILED, code, ended_at_ms, latency_ms, -1, -1, "", 0, "", 0, 0, 0, mode, told)
    return beginning(gateway_id, waiter), ended


def beginning(gateway_id: str, waiter: Waiter) -> Accepted:
    """The record of what was taken, whatever becomes of it."""
    s = waiter.submission
    return Accepted(s.id, s.customer_id, s.api_key_id, s.tier, s.model, gateway_id, s.input_bytes, s.trace_id)


def replayed_pair(gateway_id: str, waiter: Waiter, reply: Reply) -> Pair:
    """The records of the request whose stored `reply` the client of `waiter` got: same customer, key and input.

    When it ended is not stored; its time in the queue and on the GPU is what is known of it.
    """
    latency_ms = max(0.0, reply.queue_ms) + max(0.0, reply.gpu_ms)
    began = msgspec.structs.replace(beginning(gateway_id, waiter), id=reply.id)
    return began, _told(reply, created_ms(reply.id) + int(latency_ms), latency_ms, "queue")


def _told(reply: Reply, ended_at_ms: int, latency_ms: float, mode: str) -> Ended:
    output = reply.output
    return Ended(
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
    )


KEEP_S = 10.0  # A failover may lose the writes of so long.
MAX_KEPT_PAIRS = 50_000  # About 35 MB, and ten seconds of all that one gateway can do.


class LastEnds:
    """The ring. `clock` is monotonic seconds."""

    def __init__(
        self, gateway_id: str, clock: Callable[[], float] = time.monotonic, max_pairs: int = MAX_KEPT_PAIRS
    ) -> None:
        self._gateway_id = gateway_id
        self._clock = clock
        self.max_pairs = max_pairs
        self._ring: deque[tuple[float, Pair]] = deque(maxlen=max_pairs)
        self.overwritten = 0  # Pairs that were still wanted, dropped because there were too many.

    def __len__(self) -> int:
        return len(self._ring)

    def note(self, waiter: Waiter) -> Pair:
        """Keep how this accepted request ended."""
        pair = audit_pair(self._gateway_id, waiter, outcome_of(waiter.future), self._clock(), "queue")
        self.keep([pair])
        return pair

    def keep(self, pairs: Iterable[Pair]) -> None:
        """Keep pairs that Redis was told of just now."""
        now = self._clock()
        for pair in pairs:
            if len(self._ring) == self.max_pairs and now - self._ring[0][0] <= KEEP_S:
                self.overwritten += 1
            self._ring.append((now, pair))

    def forget_old(self) -> None:
        """Drop what is older than ten seconds; to be called while Redis is known to have it."""
        before = self._clock() - KEEP_S
        while self._ring and self._ring[0][0] < before:
            self._ring.popleft()

    def pairs(self) -> list[Pair]:
        """All that is kept, oldest first."""
        return [pair for _, pair in self._ring]


def outcome_of(future: "Future[Outcome] | Ending") -> Outcome | None:
    """How waiting ended; None where nobody was told, because the client left."""
    return future.result() if future.done() and not future.cancelled() else None


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
