"""When this gateway takes Redis for one that may have lost something, and whom it submits again then. No I/O.

Loss is suspected, never proved: a Redis that came back empty or from a dump, and a replica that took over, have another
epoch, unless the user of Redis may not read `epoch_run`, or some writes were lost otherwise. What all of them have in common is
that connections break. A false alarm is cheap, since everything that is sent again is idempotent by id.
"""

from collections.abc import Iterable, Sequence

from gateway.inference.pending import Waiter
from scheduler.protocol.admission import TierLimit

OTHER_EPOCH = "it has another epoch"
AWAY = "it was away"


class Signs:
    """What heartbeats and the subscription tell of Redis."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._missed = False

    def beat(self, epoch_us: int) -> str | None:
        """A heartbeat came through. Returns why Redis may have lost something, or None."""
        reason = None
        if self._epoch is not None and epoch_us != self._epoch:
            reason = OTHER_EPOCH
        elif self._missed:
            reason = AWAY
        self._epoch, self._missed = epoch_us, False
        return reason

    def missed(self) -> None:
        """A heartbeat failed."""
        self._missed = True


def candidates(waiting: Iterable[Waiter]) -> list[Waiter]:
    """Those whom Redis held, or may be about to hold: a call under way may have been answered before the loss.

    Those who run past Redis too, since they may be left to it again.
    """
    return [waiter for waiter in waiting if waiter.sent and not waiter.future.done()]


def worth_again(waiting: Iterable[Waiter], tiers: Sequence[TierLimit], now: float, p95_ms: float) -> list[Waiter]:
    """Those to submit again now: accepted, not known to be kept, and with time left for a run of typical length.

    Highest tier first, in each tier the nearest deadline first. The others end at their deadline.
    """
    rank = {tier.name: len(tier.ahead) for tier in tiers}  # A tier has itself and all that are above it ahead.
    last_start = now + p95_ms / 1000
    chosen = [
        waiter
        for waiter in waiting
        if waiter.lost
        and waiter.accepted
        and not waiter.direct
        and not waiter.gone
        and not waiter.future.done()
        and waiter.deadline >= last_start
        and waiter.submission.tier in rank
    ]
    chosen.sort(key=lambda waiter: (rank[waiter.submission.tier], waiter.deadline))
    return chosen
