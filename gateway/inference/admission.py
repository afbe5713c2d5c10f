"""Batched admission: all requests that arrived during the previous call of admit.lua share the next one.

No timer and no added wait: an idle gateway calls for one request at once, a busy one for up to 256 requests, with up to
2 MB of bodies and a share of that for each customer. A customer that Redis has just rejected for a limit of its own is
rejected here until the limit allows it again. A call whose result is unknown is repeated with the same ids, since
admission is idempotent, until Redis counts as unavailable. Requests that direct mode has taken by then stay in direct
mode. The others of the call, and all requests queued behind it, are rejected; ids that may have been admitted are
cancelled later.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gateway.circuit_breaker import ONCE_MORE, CallWatch
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import PendingRequest
from gateway.limits.quota_uses import QuotaUses
from gateway.limits.rejection_cache import RejectionCache
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import MAX_SUBMISSIONS, Admissions, Submission, TierLimit, Verdict
from scheduler.protocol.replies import Reply, readable
from scheduler.redis_client.scripts import MAX_CALL_BYTES
from scheduler.states import Admission

WORTH_TELLING_MS = 20  # Shorter waits do not change the deadline that Redis gets.
SMALL_BYTES = 4096  # A body up to this size counts for no share: 256 of them are half of a call.
SHARE_BYTES = MAX_CALL_BYTES // 4
"""Bytes that the larger bodies of one customer may take of a call while others wait."""
ENTERED = (Admission.ACCEPTED, Admission.DUPLICATE)
NOT_REJECTED = (*ENTERED, Admission.REPLAYED)


Hold = Callable[[PendingRequest, Callable[[PendingRequest], bool]], None]


class AdmissionLimits(NamedTuple):
    """The tier limits that a call of admit.lua applies."""

    tiers: Sequence[TierLimit]
    capacity_rps: float
    redis_ms: int = 0  # Redis TIME now, an upper bound; 0: not known.
    run_ms: int = 0  # Duration of a run; 0: not known.


class AdmissionBatcher:
    """Gives each submitted request its verdict. `limits` is called before each call of Redis.

    `accepted_late` is called with requests that were accepted after their clients had left, `hold` with those whose customers'
    limits are in another cell, and with what submits them again.
    """

    def __init__(
        self,
        admissions: Admissions,
        limits: Callable[[], AdmissionLimits],
        cancellations: Cancellations,
        max_pending: int = 4096,
        *,
        watch: CallWatch = ONCE_MORE,
        clock: Callable[[], float] = time.monotonic,
        accepted_late: Callable[[PendingRequest], None] | None = None,
        hold: Hold | None = None,
        took: Callable[[float], None] = lambda _: None,
        quota_uses: QuotaUses | None = None,
    ) -> None:
        self._admissions = admissions
        self._limits = limits
        self._cancellations = cancellations
        self._watch = watch
        self._pending: deque[PendingRequest] = deque()
        self._max_pending = max_pending
        self._clock = clock
        self._accepted_late = accepted_late
        self._hold = hold
        self._took = took  # Called with the duration in seconds of each call that Redis answered.
        self._quota_uses = quota_uses
        self._wake = asyncio.Event()
        self._before_call: list[Callable[[], None]] = []
        self.in_call = False  # Redis has not answered the last call yet.
        self.rejections = RejectionCache()
        self._doubted = False  # The estimate of Redis TIME was wrong: the next call is sent without it.
        self.calls = 0

    def before_each_call(self, submit: Callable[[], None]) -> None:
        """Call `submit` before each call of Redis, so that what it submits is part of that. Must not raise."""
        self._before_call.append(submit)

    @property
    def pending(self) -> int:
        """Number of requests queued for the next call."""
        return len(self._pending)

    def submit(self, pending: PendingRequest) -> bool:
        """Queue a request, with all members of its list. Returns False if too many are queued already."""
        if len(self._pending) >= self._max_pending:
            return False
        if pending.together:
            self._pending.extend(pending.together)
        else:
            self._pending.append(pending)
        self._wake.set()
        return True

    async def run(self) -> None:
        """Call Redis while requests are queued; never returns."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                self.in_call = True
                try:
                    await self._call(self._take())
                finally:
                    self.in_call = False
                for submit in self._before_call:
                    submit()

    def _take(self) -> list[PendingRequest]:
        """The oldest requests that fit into one call, without those that are done or known to be over a limit.

        Postponed requests keep their order, before all later ones.
        """
        batch: list[PendingRequest] = []
        size, shares, put_off = 0, dict[str, int](), list[PendingRequest]()
        now = self._clock()
        while self._pending and size < MAX_CALL_BYTES:
            first = self._pending[0]
            members = first.together or (first,)
            if len(batch) + len(members) > MAX_SUBMISSIONS:
                break
            for _ in members:
                self._pending.popleft()
            length = len(first.submission.body)
            if first.together:
                length = sum(len(each.submission.body) for each in members)
            if length > SMALL_BYTES or shares:
                customer_id = first.submission.customer_id
                share = shares.get(customer_id, 0) + (length if length > SMALL_BYTES else 0)
                if batch and (share > SHARE_BYTES or size + length > MAX_CALL_BYTES):
                    shares[customer_id] = SHARE_BYTES + 1  # Its later requests wait behind this one.
                    put_off += members
                    continue
                shares[customer_id] = share
            if not (self._members_to_admit(first) if first.together else _to_admit(first)):
                continue
            if self.rejections.held and (rejected := self.rejections.verdict(first.submission, now)):
                for each in members:
                    self._judged(each, rejected)
                continue
            batch += members
            size += length
        self._pending.extendleft(reversed(put_off))
        return batch

    def _members_to_admit(self, first: PendingRequest) -> Sequence[PendingRequest]:
        """All members of a list, or none if one of them is done, removed, or taken by direct mode."""
        if all(_to_admit(pending) for pending in first.together):
            return first.together
        for pending in first.together:
            if not pending.direct:
                pending.finish(ErrorCode.NO_CAPACITY)
        return ()

    async def _call(self, batch: list[PendingRequest]) -> None:
        if not batch:
            return
        for pending in batch:
            pending.sent = True
        try:
            limits = self._limits()
            if self._doubted:
                limits, self._doubted = limits._replace(redis_ms=0), False
            batch = _of_known_tiers(batch, limits)
            now = self._clock()
            verdicts = await self._ask(limits, [with_time_left(pending, now) for pending in batch])
        except RedisUnavailable:
            self._refuse(batch, ErrorCode.NO_CAPACITY)
        except Exception as error:  # noqa: BLE001  # no fault may end this loop
            log_fault("admission failed", error)
            self._refuse(batch, ErrorCode.INTERNAL_ERROR)
        else:
            failpoint("admit_unprocessed")
            if self._quota_uses is not None:
                for pending, verdict in zip(batch, verdicts, strict=True):
                    if pending.submission.group.limits.quotas:
                        self._quota_uses.note(pending.submission.group, verdict)
            judged = list(zip(batch, verdicts, strict=True))
            if [verdict for verdict in verdicts if verdict.outcome not in ENTERED]:
                judged = self._held_back(judged)
                self._note_rejections(judged)
                judged = self._ask_again(judged) if limits.redis_ms else judged
            for pending, verdict in judged:
                self._judged(pending, verdict)

    def _ask_again(self, judged: list[tuple[PendingRequest, Verdict]]) -> list[tuple[PendingRequest, Verdict]]:
        """The verdicts that hold. Requests judged too late that are in time by the gateway's clock are first in the next call.

        The clock of Redis has moved forwards then.
        """
        now = self._clock()
        early = {
            pending for pending, verdict in judged if verdict.outcome is Admission.TOO_LATE and now < pending.deadline
        }
        again = {pending for pending in early if early.issuperset(pending.together)}
        if again:
            self._doubted = True
            self._pending.extendleft(pending for pending, _ in reversed(judged) if pending in again)
        return [(pending, verdict) for pending, verdict in judged if pending not in again]

    def _held_back(self, judged: list[tuple[PendingRequest, Verdict]]) -> list[tuple[PendingRequest, Verdict]]:
        """The verdicts but for those of requests that wait until the limits of their customers are in this cell."""
        away = [pending for pending, verdict in judged if verdict.outcome is Admission.ELSEWHERE]
        for pending in away:
            pending.sent = False  # Redis does not have it.
        for pending in away:
            if self._hold is None:
                pending.finish(ErrorCode.NO_CAPACITY)
            elif not pending.together or pending.together[0] is pending:
                self._hold(pending, self.submit)
        return judged if not away else [each for each in judged if each[1].outcome is not Admission.ELSEWHERE]

    def _note_rejections(self, judged: list[tuple[PendingRequest, Verdict]]) -> None:
        now = self._clock()
        together = 0  # Members still to come of the list that is being read.
        for pending, verdict in judged:
            together = max(together - 1, len(pending.together))
            if not together and verdict.outcome not in ENTERED:
                self.rejections.note(pending.submission, verdict, now)

    async def _ask(self, limits: AdmissionLimits, submissions: Sequence[Submission]) -> list[Verdict]:
        self.calls += 1
        tries = 0
        failpoint("admit_unasked")
        while True:
            self._watch.begun()
            begun = self._clock()
            try:
                verdicts = await self._admissions.admit(*limits[:2], submissions, *limits[2:])
            except RedisUnavailable:
                self._watch.failed()
                tries += 1
                if not self._watch.try_again(tries):
                    raise
            else:
                self._watch.answered()
                self._took(self._clock() - begun)
                return verdicts

    def _judged(self, pending: PendingRequest, verdict: Verdict) -> None:
        if verdict.outcome not in ENTERED:
            if not pending.direct:  # Else direct mode serves it already.
                pending.verdict = verdict
                pending.finish(verdict)
            return
        pending.verdict = verdict
        pending.accepted = True
        if pending.reader is not None:
            pending.reader.admitted()
        if pending.gone or pending.done:  # It was done before the call returned.
            code = pending.error_code
            self._cancellations.add(
                pending.id, code or ErrorCode.CANCELLED, running=pending.streams, delivered=code is not None
            )
        if pending.gone and self._accepted_late is not None:
            self._accepted_late(pending)
        if verdict.reply and (reply := readable(verdict.reply)):  # A cached reply is the outcome.
            pending.finish(reply)

    def _refuse(self, batch: list[PendingRequest], code: ErrorCode) -> None:
        for pending in batch:
            # Redis may have run the call although it failed: a reply that the client has must not be revoked.
            if not pending.direct and not isinstance(pending.outcome, Reply):
                self._cancellations.add(pending.id, pending.error_code or code, delivered=True)
                pending.finish(code)
        # Requests queued behind would only wait for the same result.
        for pending in self._pending:
            if not pending.direct:
                pending.finish(code)
        self._pending.clear()


def _to_admit(pending: PendingRequest) -> bool:
    return not pending.gone and not pending.direct and not pending.done


def with_time_left(pending: PendingRequest, now: float) -> Submission:
    """The submission with the remaining time of its deadline, which counts from its arrival. `now`: monotonic seconds."""
    left_ms = int((pending.deadline - now) * 1000)
    if left_ms < pending.submission.total_ms - WORTH_TELLING_MS:
        return replace(pending.submission, total_ms=max(1, left_ms))
    return pending.submission


def _of_known_tiers(batch: list[PendingRequest], limits: AdmissionLimits) -> list[PendingRequest]:
    """Requests whose tier exists. A tier that was removed since authentication must not fail the whole call."""
    names = {tier.name for tier in limits.tiers}
    for pending in batch:
        if pending.submission.tier not in names:
            pending.finish(ErrorCode.CATALOG_UNAVAILABLE)
    return [pending for pending in batch if pending.submission.tier in names]
