"""The open requests of direct mode: how each is completed, recorded in the audit, and answered.

A request is sent to a worker after its accepted record is on disk, and its client gets the response after its ended record
is. A request that Redis had accepted, and that cannot be served here, gets no response here: it waits for Redis or for its
deadline.
"""

import asyncio
from collections.abc import Callable

from gateway.direct.audit import DirectAudit
from gateway.direct.queue import DirectEntry, OpenRequests
from gateway.inference.audit_pairs import Pair, accepted_record, audit_pair
from gateway.inference.deadlines import LEAD_S, Cancellations
from gateway.inference.pending import Outcome, PendingRequest
from gateway.limits.rejections import rejection_error
from scheduler.errors import CHARGED_FAILURES, ErrorCode
from scheduler.failpoints import failpoint
from scheduler.protocol.admission import Verdict
from scheduler.protocol.batches import Outcome as Ran
from scheduler.protocol.replies import Reply
from scheduler.states import State

END_MARGIN_S = LEAD_S + 0.075  # Before the deadline sweep: time to write the audit to disk.

# Errors of the worker, not of the input: another worker may succeed.
_WORKER_ERRORS = frozenset(
    {ErrorCode.WORKER_LOST, ErrorCode.GPU_TIMEOUT, ErrorCode.MODEL_TOO_SLOW, ErrorCode.DEADLINE_EXCEEDED}
)


class DirectCompletion:
    """Tracks direct requests from entry to response. `clock`: monotonic seconds."""

    def __init__(
        self, gateway_id: str, audit: DirectAudit, cancellations: Cancellations, clock: Callable[[], float]
    ) -> None:
        self._gateway_id = gateway_id
        self._audit = audit
        self._cancellations = cancellations
        self._clock = clock
        self._open = OpenRequests()
        self._recording = 0
        self._unwritten: list[
            Pair
        ] = []  # Ended records that could not be written, of requests with an accepted record.
        self.completed = 0

    def __len__(self) -> int:
        """The number of requests without a response, including those whose audit is being written."""
        return len(self._open) + self._recording

    def of_customer(self, customer_id: str) -> int:
        """The number of open requests of a customer."""
        return self._open.of_customer(customer_id)

    def add(self, entry: DirectEntry) -> None:
        """Start to track a request."""
        entry.pending.direct = True
        self._open.add(entry)

    async def record_accepted(self, batch: list[DirectEntry]) -> list[DirectEntry]:
        """Write the accepted records that are not on disk yet. Returns the requests that may be sent to a worker.

        A request whose record cannot be written is rejected.
        """
        pending = [entry.recorded or self._write_accepted(entry) for entry in batch]
        if not all(future.done() for future in pending):
            await asyncio.wait(pending)
        ready = [entry for entry in batch if entry.is_recorded and self.may_run(entry)]
        if ready:
            failpoint("direct_unsent")
        return ready

    def may_run(self, entry: DirectEntry) -> bool:
        """Whether it is open and has no outcome yet."""
        return entry.id in self._open and not entry.pending.done

    def ran(self, entry: DirectEntry, outcome: Ran, worker_id: str, batch_size: int) -> None:
        """A worker returned the outcome of a request."""
        if entry.id not in self._open:
            return
        if outcome.error_code in _WORKER_ERRORS:
            self.give_up(entry, ErrorCode(outcome.error_code))
            return
        self.completed += not outcome.error_code
        self._finish(entry, _reply(entry, outcome, worker_id, batch_size))

    def give_up(self, entry: DirectEntry, code: ErrorCode) -> None:
        """A request cannot be served here."""
        if entry.id not in self._open:
            return
        if entry.pending.accepted:
            self._return_to_redis(entry)
        else:
            self._finish(entry, code)

    def reject(self, entry: DirectEntry, code: ErrorCode) -> None:
        """Reject a request. It has no audit record, unless its accepted record is on disk."""
        if entry.is_recorded and not entry.pending.accepted:
            self._finish(entry, code)
            return
        self._return_to_redis(entry)
        reject(entry.pending, code, self._cancellations)

    def sweep(self, now: float) -> None:
        """Finish requests that are done elsewhere, past their deadline, or queued for too long."""
        for entry in self._open:
            pending = entry.pending
            if pending.done:
                self._finish(entry, None)
            elif pending.deadline - now < END_MARGIN_S:
                self.give_up(entry, ErrorCode.DEADLINE_EXCEEDED)
            elif entry.started_at is None and not entry.attempts and entry.waited_ms(now) > pending.submission.queue_ms:
                self.give_up(entry, ErrorCode.QUEUE_TIMEOUT)

    def retry_records(self) -> None:
        """Write the records that could not be written before, once the disk may accept records again."""
        if self._unwritten and not self._audit.writer.failed_recently:
            unwritten, self._unwritten = self._unwritten, []
            for pair in unwritten:
                self._write_late(pair)

    def _write_late(self, pair: Pair) -> None:
        self._audit.record(pair, lambda stored: None if stored else self._unwritten.append(pair))

    def _write_accepted(self, entry: DirectEntry) -> "asyncio.Future[bool]":
        entry.recorded = recorded = asyncio.get_running_loop().create_future()
        record = accepted_record(self._gateway_id, entry.pending)
        self._audit.record((record, None), lambda stored: self._accepted_written(entry, stored=stored))
        return recorded

    def _accepted_written(self, entry: DirectEntry, *, stored: bool) -> None:
        if entry.recorded is not None:
            entry.recorded.set_result(stored)
        if not stored:
            if self._open.get(entry.id) is entry:
                self.reject(entry, ErrorCode.NO_CAPACITY)
        elif not entry.pending.direct:  # It was returned to Redis meanwhile.
            self._audit.release(entry.id)

    def _return_to_redis(self, entry: DirectEntry) -> None:
        self._open.remove(entry.id)
        entry.pending.direct = False
        if entry.is_recorded:
            self._audit.release(entry.id)

    def _finish(self, entry: DirectEntry, outcome: Outcome | None) -> None:
        """Write the ended record, then respond. If a response was sent already, its outcome is recorded."""
        self._open.remove(entry.id)
        pending = entry.pending
        if pending.done:
            if isinstance(pending.outcome, Verdict) and not entry.is_recorded:
                return  # It was rejected, so it has no audit record.
            pair = self._delivered_pair(pending)
        else:
            pair = audit_pair(self._gateway_id, pending, outcome, self._clock(), "direct")
            pending.settled = True
        self._recording += 1
        self._audit.record(pair, lambda stored: self._ended_written(entry, outcome, stored=stored))

    def _delivered_pair(self, pending: PendingRequest) -> Pair:
        """The audit pair of the outcome that was already delivered."""
        outcome = pending.outcome
        if isinstance(outcome, Verdict):
            outcome = rejection_error(outcome, base_limit_allows=False).code
        mode = "queue" if isinstance(outcome, Reply) else "direct"
        return audit_pair(self._gateway_id, pending, outcome, self._clock(), mode)

    def _ended_written(self, entry: DirectEntry, outcome: Outcome | None, *, stored: bool) -> None:
        """If it is not stored, the client gets an error; the ended record with that error is written later."""
        self._recording -= 1
        pending = entry.pending
        if stored:
            if outcome is not None:
                pending.finish(outcome)
                sent = pending.outcome
                if sent is not outcome and sent is ErrorCode.DEADLINE_EXCEEDED:  # The disk took longer than the grace.
                    self._write_late(self._delivered_pair(pending))
            return
        pending.direct = pending.settled = False
        reject(pending, ErrorCode.NO_CAPACITY, self._cancellations)
        if entry.is_recorded and pending.done:
            self._unwritten.append(self._delivered_pair(pending))
        elif entry.is_recorded:  # Redis accepted the request, and ends it.
            self._audit.release(entry.id)


def reject(pending: PendingRequest, code: ErrorCode, cancellations: Cancellations) -> None:
    """Reject a request, unless Redis has accepted it or it has a reply; if Redis may have accepted it, cancel it there."""
    if pending.accepted or isinstance(pending.outcome, Reply):
        return
    if pending.sent:
        cancellations.add(pending.id, code, delivered=True)
    pending.finish(code)


def _reply(entry: DirectEntry, ran: Ran, worker_id: str, batch_size: int) -> Reply:
    pending = entry.pending
    started_at = pending.started if entry.started_at is None else entry.started_at
    if ran.gpu_ms < 0 or (ran.error_code and ran.error_code not in CHARGED_FAILURES):
        cost_ms = -1.0  # The service failed the request: it pays nothing.
    else:
        cost_ms = ran.cost_ms or ran.gpu_ms / max(1, batch_size)  # Older workers do not report its share of the batch.
    return Reply(
        pending.id,
        pending.submission.customer_id,
        pending.submission.nonce,
        State.FAILED if ran.error_code else State.COMPLETED,
        ran.error_code,
        entry.attempts + 1,
        max(0.0, (started_at - pending.started) * 1000),
        "",
        batch_size,
        worker_id,
        ran.gpu_ms,
        ran.tokens_used,
        ran.model_version,
        ran.output,
        ran.output_tokens,
        ran.finish_reason,
        cost_ms=cost_ms,
    )
