"""The requests that went past Redis and have no answer yet: how each ends, what the audit says of it, who is told.

No worker is called with a request before the audit's beginning of it is on the disk, and no client is answered before
its pair is. A request that Redis accepted before, and that could not be served here, is not answered: it goes on
waiting for Redis, or for its deadline.
"""

import asyncio
from collections.abc import Callable

from gateway.direct.queue import DirectEntry, OpenRequests
from gateway.direct.spool_tasks import DirectAudit
from gateway.direct.workers import END_MARGIN_S
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import Outcome, PendingRequest
from gateway.inference.recovery import Pair, audit_pair, beginning
from gateway.limits.rejections import refusal
from scheduler.errors import ErrorCode
from scheduler.failpoints import failpoint
from scheduler.protocol.admission import Verdict
from scheduler.protocol.batches import Outcome as Ran
from scheduler.protocol.replies import Reply
from scheduler.states import State

# What a worker says of itself and not of the input: somebody else might have done better.
_NOT_THE_INPUT = frozenset({ErrorCode.WORKER_LOST, ErrorCode.GPU_TIMEOUT, ErrorCode.DEADLINE_EXCEEDED})


class DirectCompletion:
    """From entry to answer. `clock` is monotonic seconds."""

    def __init__(
        self, gateway_id: str, audit: DirectAudit, cancellations: Cancellations, clock: Callable[[], float]
    ) -> None:
        self._gateway_id = gateway_id
        self._audit = audit
        self._cancellations = cancellations
        self._clock = clock
        self._open = OpenRequests()
        self._noting = 0
        self._owed: list[Pair] = []  # Ends that the disk did not take, of what it has the beginning of.
        self.completed = 0
        self.unsafe = 0  # Not answered with their output, because the audit could not be written.

    def __len__(self) -> int:
        """Requests without an answer, those whose audit is on its way to the disk included."""
        return len(self._open) + self._noting

    def of_customer(self, customer_id: str) -> int:
        """How many requests of one customer wait or run here."""
        return self._open.of_customer(customer_id)

    def take(self, entry: DirectEntry) -> None:
        """It is ours now."""
        entry.pending.direct = True
        self._open.put(entry)

    async def begin(self, batch: list[DirectEntry]) -> list[DirectEntry]:
        """Put the beginnings on the disk that are not there yet; returns who may be sent to a worker now.

        Where the disk does not take one, its request is refused: nothing runs that cannot be noted.
        """
        unwritten = [entry.begun or self._note_beginning(entry) for entry in batch]
        if not all(future.done() for future in unwritten):
            await asyncio.wait(unwritten)
        ready = [entry for entry in batch if entry.on_record and self.may_run(entry)]
        if ready:
            failpoint("direct_unsent")
        return ready

    def may_run(self, entry: DirectEntry) -> bool:
        """Whether it is open and has no outcome yet."""
        return entry.id in self._open and not entry.pending.done

    def ran(self, entry: DirectEntry, outcome: Ran, worker_id: str, batch_size: int) -> None:
        """A worker said what became of it."""
        if entry.id not in self._open:
            return
        if outcome.error_code in _NOT_THE_INPUT:
            self.given_up(entry, ErrorCode(outcome.error_code))
            return
        self.completed += not outcome.error_code
        self._end(entry, _reply(entry, outcome, worker_id, batch_size))

    def given_up(self, entry: DirectEntry, code: ErrorCode) -> None:
        """It cannot be served here."""
        if entry.id not in self._open:
            return
        if entry.pending.accepted:
            self._leave_to_redis(entry)
        else:
            self._end(entry, code)

    def refuse(self, entry: DirectEntry, code: ErrorCode) -> None:
        """It has to go: as if it had not come, unless it is on record already, since a worker was to run it."""
        if entry.on_record and not entry.pending.accepted:
            self._end(entry, code)
            return
        self._leave_to_redis(entry)
        refuse(entry.pending, code, self._cancellations)

    def sweep(self, now: float) -> None:
        """End those that nobody waits for any more, and those whose time is over."""
        for entry in self._open:
            pending = entry.pending
            if pending.done:
                self._end(entry, None)
            elif pending.deadline - now < END_MARGIN_S:
                self.given_up(entry, ErrorCode.DEADLINE_EXCEEDED)
            elif entry.started_at is None and not entry.attempts and entry.waited_ms(now) > pending.submission.queue_ms:
                self.given_up(entry, ErrorCode.QUEUE_TIMEOUT)

    def settle(self) -> None:
        """Try again to note what the disk did not take, once it may take something again."""
        if self._owed and not self._audit.writer.resting:
            owed, self._owed = self._owed, []
            for pair in owed:
                self._note_owed(pair)

    def _note_owed(self, pair: Pair) -> None:
        self._audit.note(pair, lambda safe: None if safe else self._owed.append(pair))

    def _note_beginning(self, entry: DirectEntry) -> "asyncio.Future[bool]":
        entry.begun = begun = asyncio.get_running_loop().create_future()
        self._audit.note((beginning(self._gateway_id, entry.pending), None), lambda safe: self._begun(entry, safe=safe))
        return begun

    def _begun(self, entry: DirectEntry, *, safe: bool) -> None:
        if entry.begun is not None:
            entry.begun.set_result(safe)
        if not safe:
            self.unsafe += 1
            if self._open.get(entry.id) is entry:
                self.refuse(entry, ErrorCode.NO_CAPACITY)
        elif not entry.pending.direct:  # It was left to Redis meanwhile.
            self._audit.release(entry.id)

    def _leave_to_redis(self, entry: DirectEntry) -> None:
        self._open.take(entry.id)
        entry.pending.direct = False
        if entry.on_record:
            self._audit.release(entry.id)

    def _end(self, entry: DirectEntry, outcome: Outcome | None) -> None:
        """Note it, then answer. Where somebody else answered already, that is what is noted."""
        self._open.take(entry.id)
        pending = entry.pending
        if pending.done:
            if isinstance(pending.outcome, Verdict) and not entry.on_record:
                return  # Refused after all: there is nothing to remember.
            pair = self._pair_as_told(pending)
        else:
            pair = audit_pair(self._gateway_id, pending, outcome, self._clock(), "direct")
            pending.settled = True
        self._noting += 1
        self._audit.note(pair, lambda safe: self._noted(entry, outcome, safe=safe))

    def _pair_as_told(self, pending: PendingRequest) -> Pair:
        """The audit pair of the outcome that was already delivered."""
        outcome = pending.outcome
        if isinstance(outcome, Verdict):
            outcome = refusal(outcome, base_limit_allows=False).code
        mode = "queue" if isinstance(outcome, Reply) else "direct"
        return audit_pair(self._gateway_id, pending, outcome, self._clock(), mode)

    def _noted(self, entry: DirectEntry, outcome: Outcome | None, *, safe: bool) -> None:
        self._noting -= 1
        if not safe:
            self._not_noted(entry)
        elif outcome is not None:
            entry.pending.finish(outcome)
            sent = entry.pending.outcome
            if sent is not outcome and sent is ErrorCode.DEADLINE_EXCEEDED:  # The disk took longer than the grace.
                self._note_owed(self._pair_as_told(entry.pending))

    def _not_noted(self, entry: DirectEntry) -> None:
        """The client does not get what the audit does not have. It is told so, and its end is owed to its beginning."""
        self.unsafe += 1
        pending = entry.pending
        pending.direct = pending.settled = False
        refuse(pending, ErrorCode.NO_CAPACITY, self._cancellations)
        if entry.on_record and pending.done:
            self._owed.append(self._pair_as_told(pending))
        elif entry.on_record:  # Redis accepted it, and ends it.
            self._audit.release(entry.id)


def refuse(pending: PendingRequest, code: ErrorCode, cancellations: Cancellations) -> None:
    """Tell the client to try again. What Redis accepted is not refused; what it may have accepted is ended there."""
    if pending.accepted:
        return
    if pending.sent:
        cancellations.add(pending.id, code, told=True)
    pending.finish(code)


def _reply(entry: DirectEntry, ran: Ran, worker_id: str, batch_size: int) -> Reply:
    pending = entry.pending
    started_at = pending.started if entry.started_at is None else entry.started_at
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
    )
