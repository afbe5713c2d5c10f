"""Replies to jobs from the jobs' channel, and what is to be done with each job. The stored replies are the truth.

The inbox is bounded and may lose what it holds: the reconciler finds the rest in the stored replies. The decision is
pure.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from gateway.inference.pending import PendingRequest
from ledger.jobs import JobEnd
from scheduler.errors import ErrorCode
from scheduler.protocol.replies import Reply, RequestStatus
from scheduler.states import State

GRACE_S = 5.0
"""After its deadline Redis ends a job by itself; who has heard of no end so long after it need not go on waiting."""

LEAST_LEFT_S = 0.1
"""With less time than this none is queued again."""


class JobStep(Enum):
    """What the keeper does with an open job now."""

    WAIT = "wait"  # Somebody has it, or it cannot be known now.
    WRITE = "write"  # Redis has its reply.
    GIVE_UP = "give_up"  # Redis knows that it ended, but not with what.
    AGAIN = "again"  # Redis has lost it: queue it again.
    EXPIRE = "expire"  # Redis has it and its time is up: end it there first, since its reply may be on the way.
    FAIL = "fail"  # Its time is up, and Redis does not know it or is away.


def next_step(left_s: float, stand: RequestStatus | None) -> JobStep:
    """`left_s` until its deadline, below 0 after it; `stand`: what Redis knows, None while it is away."""
    if stand is not None and stand.reply is not None:
        return JobStep.WRITE
    if stand is not None and stand.ended:
        return JobStep.GIVE_UP
    known = stand is not None and stand.state != ""
    if left_s <= -GRACE_S:
        return JobStep.EXPIRE if known else JobStep.FAIL
    if known or stand is None or left_s < LEAST_LEFT_S:
        return JobStep.WAIT
    return JobStep.AGAIN


def end_of(reply: Reply) -> JobEnd:
    """What is stored of a reply."""
    code = "" if reply.state == State.COMPLETED else reply.error_code or ErrorCode.INTERNAL_ERROR.value
    return JobEnd(reply.id, code, reply.output, reply.customer_id, reply.tokens_used)


def given_up(job_id: str, stand: RequestStatus) -> JobEnd:
    """The end of one that Redis knows to have ended, without a reply."""
    return JobEnd(job_id, stand.error_code or ErrorCode.INTERNAL_ERROR.value)


MOST = 4096
MOST_BYTES = 16 << 20
KEEP_S = 5.0
"""A fast model answers before the job's row is committed: its reply is offered again for so long,"""

OFFER_EVERY_S = 0.25
"""so often."""


class _StoredReply:
    """One end, since when it is here, and when it is offered next; monotonic seconds."""

    __slots__ = ("end", "next_at", "since")

    def __init__(self, end: JobEnd, now: float) -> None:
        self.end = end
        self.since = self.next_at = now


class JobInbox:
    """What the subscriber hands over. `lost` is set where something may have been missed. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, _StoredReply] = {}
        self._bytes = 0
        self.arrived = asyncio.Event()
        self.lost = False

    def __len__(self) -> int:
        return len(self._ends)

    def started_before(self, _moment: float) -> Sequence[PendingRequest]:
        """Nobody waits here whose stored reply the subscriber would have to read."""
        return ()

    def resolve_all(self, replies: Iterable[Reply | None]) -> None:
        """Keep them until they are taken."""
        now = self._clock()
        for reply in replies:
            if reply is None or reply.id in self._ends:
                continue
            if len(self._ends) >= MOST or self._bytes + len(reply.output) > MOST_BYTES:
                self.lost = True
                continue
            self._ends[reply.id] = _StoredReply(end_of(reply), now)
            self._bytes += len(reply.output)
        self.arrived.set()

    def missed(self) -> None:
        """The subscription was made again: what was published meanwhile is not here."""
        self.lost = True
        self.arrived.set()

    def take(self) -> list[JobEnd]:
        """What is new, and once in a while the others; each stays until `written` or too old."""
        self.arrived.clear()
        now = self._clock()
        self._drop([job_id for job_id, kept in self._ends.items() if kept.since < now - KEEP_S])
        taken = [kept for kept in self._ends.values() if kept.next_at <= now]
        for kept in taken:
            kept.next_at = now + OFFER_EVERY_S
        return [kept.end for kept in taken]

    def written(self, ids: Iterable[str]) -> None:
        """These are stored."""
        self._drop(ids)

    def clear(self) -> None:
        """Forget everything."""
        self._ends, self._bytes, self.lost = {}, 0, False

    def _drop(self, ids: Iterable[str]) -> None:
        for job_id in ids:
            dropped = self._ends.pop(job_id, None)
            if dropped is not None:
                self._bytes -= len(dropped.end.output)
