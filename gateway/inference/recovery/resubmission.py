"""Which requests to submit again after a loss in Redis."""

from collections.abc import Iterable, Sequence

from gateway.inference.pending import PendingRequest
from scheduler.protocol.admission import TierLimit


def candidates(waiting: Iterable[PendingRequest]) -> list[PendingRequest]:
    """Requests that Redis may have lost, including those of a call in progress, which may have run before the loss.

    Requests in direct mode are included, since they may be returned to Redis.
    """
    return [pending for pending in waiting if pending.sent and not pending.done]


def to_resubmit(
    waiting: Iterable[PendingRequest], tiers: Sequence[TierLimit], now: float, p95_ms: float
) -> list[PendingRequest]:
    """Requests to resubmit now: accepted, possibly lost, and with time left for a run of `p95_ms`.

    Highest tier first, in each tier the nearest deadline first. The others end at their deadline. `now`: monotonic
    seconds.
    """
    rank = {tier.name: len(tier.ahead) for tier in tiers}  # `ahead` holds the tier itself and all above it.
    last_start = now + p95_ms / 1000
    chosen = [
        pending
        for pending in waiting
        if pending.lost
        and pending.accepted
        and not pending.direct
        and not pending.gone
        and not pending.done
        and pending.deadline >= last_start
        and pending.submission.tier in rank
    ]
    chosen.sort(key=lambda pending: (rank[pending.submission.tier], pending.deadline))
    return chosen
