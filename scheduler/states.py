"""The life of a request and the answer of admission: two enums, every member one sentence."""

from enum import StrEnum


class State(StrEnum):
    """Where an accepted request stands: `queued -> processing -> completed | failed`."""

    QUEUED = "queued"  # It waits in `queue:<tier>`.
    PROCESSING = "processing"  # It is a member of a batch, formed or running.
    COMPLETED = "completed"  # It has an output.
    FAILED = "failed"  # It has an error code, and will never have an output.


TERMINAL = frozenset({State.COMPLETED, State.FAILED})


class Admission(StrEnum):
    """What `admit` said of one submission; everything but the first two rejects, and rejecting spends nothing."""

    ACCEPTED = "accepted"  # It is queued, stored and noted for the audit.
    DUPLICATE = "duplicate"  # The same id was accepted before; nothing was done again.
    KEY_LIMIT = "key_limit"  # The key's own token bucket is empty.
    CUSTOMER_LIMIT = "customer_limit"  # The customer's token bucket, which all of its keys share, is empty.
    TOKEN_LIMIT = "token_limit"  # noqa: S105  # The customer's model tokens of this minute are used up.
    CONCURRENCY = "concurrency"  # As many requests of the customer are under way as may be.
    QUOTA = "quota"  # A quota of the customer's day or month is used up.
    TIER_LIMIT = "tier_limit"  # The tier's share of the present capacity is used up.
    SHED = "shed"  # Too much waits in this tier and those above it.
    QUEUE_FULL = "queue_full"  # The tier's queue is at its cap.
    WAIT = "predicted_wait"  # What waits before it would take longer than it may wait, or leave no time to run.
    BACKPRESSURE = "backpressure"  # Redis has too little memory left to store it.
    REPLAYED = "replayed"  # Its idempotency key has an answer already; the verdict names the request that has it.
    IN_PROGRESS = "in_progress"  # The request of its idempotency key is still under way.
    TOO_LATE = "too_late"  # The call came so late that the time of the request is over.
    REUSED = "reused"  # Its idempotency key was used with another body.
