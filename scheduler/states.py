"""The states of a request, and the outcomes of admission."""

from enum import StrEnum

BACKGROUND = ".background"
"""The suffix of a tier's background queue. Names of tiers have no dot."""


class State(StrEnum):
    """The state of an accepted request: `queued -> processing -> completed | failed`."""

    QUEUED = "queued"  # In `queue:<tier>`.
    PROCESSING = "processing"  # In a batch, formed or running.
    COMPLETED = "completed"  # With an output.
    FAILED = "failed"  # With an error code instead of an output.


TERMINAL = frozenset({State.COMPLETED, State.FAILED})


def background_of(tier: str) -> str:
    """The name of the queue with the jobs and batch lines of a tier; the tier of their rows in Redis."""
    return tier + BACKGROUND


def tier_of(queue: str) -> str:
    """The tier of a tier queue or a background queue."""
    return queue.removesuffix(BACKGROUND)


class Admission(StrEnum):
    """The outcome of `admit` for one submission. All but the first two reject it; a rejection is not charged."""

    ACCEPTED = "accepted"  # It is stored, queued, and recorded for the audit.
    DUPLICATE = "duplicate"  # The same id was accepted before; nothing was changed.
    KEY_LIMIT = "key_limit"  # The key's own token bucket is empty.
    CUSTOMER_LIMIT = "customer_limit"  # The customer's token bucket, which all of its keys share, is empty.
    TOKEN_LIMIT = "token_limit"  # noqa: S105  # The customer's model tokens of this minute are used up.
    CONCURRENCY = "concurrency"  # The customer has as many unfinished requests as allowed.
    QUOTA = "quota"  # A quota of the customer, such as that of its week, is used up.
    TIER_LIMIT = "tier_limit"  # The tier's share of the present capacity is used up.
    SHED = "shed"  # Too many requests are queued in this tier and those above it.
    QUEUE_FULL = "queue_full"  # The tier's queue is at its cap.
    WAIT = "predicted_wait"  # The predicted queue time exceeds its limit, or leaves no time to run.
    BACKPRESSURE = "backpressure"  # Redis has not enough memory left to store it.
    REPLAYED = "replayed"  # There is a stored reply for its idempotency key; the verdict names that request.
    IN_PROGRESS = "in_progress"  # The first request with its idempotency key has not ended.
    TOO_LATE = "too_late"  # Its deadline has passed.
    ELSEWHERE = "elsewhere"  # Its customer has another cell, or its limits have not arrived in this one.
    REUSED = "reused"  # Its idempotency key was used with another body.
