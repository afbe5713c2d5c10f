"""The end of a job as Redis knows it, and what is to be done with one that has no end yet. Pure."""

from enum import Enum

from ledger.jobs import JobEnd
from scheduler.errors import ErrorCode
from scheduler.protocol.replies import Reply
from scheduler.stands import Stand
from scheduler.states import State

GRACE_S = 5.0
"""After its deadline Redis ends a job by itself; who has heard of no end so long after it need not go on waiting."""

LEAST_LEFT_S = 0.1
"""With less time than this none is queued again."""


class Step(Enum):
    """What the keeper does with an open job now."""

    WAIT = "wait"  # Somebody has it, or it cannot be known now.
    WRITE = "write"  # Redis has its reply.
    GIVE_UP = "give_up"  # Redis knows that it ended, but not with what.
    AGAIN = "again"  # Redis has lost it: queue it again.
    EXPIRE = "expire"  # Redis has it and its time is up: end it there first, since its reply may be on the way.
    FAIL = "fail"  # Its time is up, and Redis does not know it or is away.


def next_step(left_s: float, stand: Stand | None) -> Step:
    """`left_s` until its deadline, below 0 after it; `stand`: what Redis knows, None while it is away."""
    if stand is not None and stand.reply is not None:
        return Step.WRITE
    if stand is not None and stand.ended:
        return Step.GIVE_UP
    known = stand is not None and stand.state != ""
    if left_s <= -GRACE_S:
        return Step.EXPIRE if known else Step.FAIL
    if known or stand is None or left_s < LEAST_LEFT_S:
        return Step.WAIT
    return Step.AGAIN


def end_of(reply: Reply) -> JobEnd:
    """What is stored of a reply."""
    code = "" if reply.state == State.COMPLETED else reply.error_code or ErrorCode.INTERNAL_ERROR.value
    return JobEnd(reply.id, code, reply.output, reply.customer_id, reply.tokens_used)


def given_up(job_id: str, stand: Stand) -> JobEnd:
    """The end of one that Redis knows to have ended, without a reply."""
    return JobEnd(job_id, stand.error_code or ErrorCode.INTERNAL_ERROR.value)
