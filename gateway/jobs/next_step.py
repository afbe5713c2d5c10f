"""The next step of an open job, by its deadline and its status in Redis: a pure function."""

from enum import Enum

from scheduler.protocol.request_status import RequestStatus

GRACE_S = 5.0
"""After its deadline, Redis ends a job by itself. A job without an end is ended by the reconciler this much later."""

LEAST_LEFT_S = 0.1
"""A job with less time left is not queued again."""


class JobStep(Enum):
    """What the reconciler does with an open job."""

    WAIT = "wait"  # Redis has it, or Redis is not available.
    WRITE = "write"  # Redis has its reply.
    GIVE_UP = "give_up"  # It ended in Redis without a reply.
    AGAIN = "again"  # Redis has lost it: queue it again.
    EXPIRE = "expire"  # Redis has it after its deadline: end it there first, since its reply may be on the way.
    FAIL = "fail"  # Its deadline has passed, and Redis does not have it or is not available.


def next_step(left_s: float, known: RequestStatus | None) -> JobStep:
    """`left_s` until its deadline, negative after it. `known`: its status in Redis, None if Redis is not available."""
    if known is not None and known.reply is not None:
        return JobStep.WRITE
    if known is not None and known.ended:
        return JobStep.GIVE_UP
    exists = known is not None and known.state != ""
    if left_s <= -GRACE_S:
        return JobStep.EXPIRE if exists else JobStep.FAIL
    if exists or known is None or left_s < LEAST_LEFT_S:
        return JobStep.WAIT
    return JobStep.AGAIN
