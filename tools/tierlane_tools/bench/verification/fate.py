"""What an answer says about the audit row of its request."""

from enum import Enum

from scheduler.errors import ErrorCode

# Codes that only an accepted request can get, and codes that one may get before as well as after.
_AFTER_ACCEPTANCE = frozenset(
    {
        ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.GPU_TIMEOUT,
        ErrorCode.POISON_REQUEST,
        ErrorCode.INVALID_OUTPUT,
        ErrorCode.WORKER_LOST,
    }
)
_EITHER = frozenset(
    {
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.GATEWAY_LOST,
        ErrorCode.NO_CAPACITY,
        ErrorCode.MODEL_TOO_SLOW,
        ErrorCode.DRAINING,
        ErrorCode.CANCELLED,
        ErrorCode.ABANDONED,
        ErrorCode.INTERNAL_ERROR,
    }
)


class Fate(Enum):
    """What an answer says about the request's audit row."""

    COMPLETED = "completed"
    """200: one row, completed."""
    FAILED = "failed"
    """Failed after it was accepted: one row, failed."""
    UNCLEAR = "unclear"
    """The code does not tell whether it had been accepted: one row or none."""
    REFUSED = "refused"
    """Refused at the door: no row."""


def fate_of(status: int, code: str) -> Fate:
    """What an answer with this status and error code ("" = none) says."""
    if status == 200:
        return Fate.COMPLETED
    if code in _AFTER_ACCEPTANCE:
        return Fate.FAILED
    # An error without a code of ours comes from something in between, which knows nothing of acceptance.
    return Fate.UNCLEAR if code in _EITHER or not code else Fate.REFUSED
