"""Who may enter while Redis is away: the limits of admission as far as one gateway alone can hold them. No I/O."""

from gateway.direct_queue import DirectQueue
from gateway.local_limits import LocalLimits, Share
from scheduler.admission import Submission, TierLimit, Verdict
from scheduler.states import Admission

QUEUE_RETRY_MS = 500


class DirectDoor:
    """Judges as `admit` does: the key's bucket, the tier's, then room; a refusal spends nothing."""

    def __init__(self, queue: DirectQueue, limits: LocalLimits | None = None) -> None:
        self._queue = queue
        self._limits = limits or LocalLimits()
        self._gateways = 1

    def open(self, gateways: int) -> None:
        """Direct mode begins, with so many gateways to share the limits with."""
        self._limits.clear()
        self._gateways = max(1, gateways)

    def judge(self, submission: Submission, tier: TierLimit, priority: int, now: float) -> Verdict:
        """The verdict on a newcomer; `now` is monotonic seconds."""
        key_share = Share(submission.rate, submission.burst).part(self._gateways)
        tier_share = Share(tier.rate, tier.burst).part(self._gateways)
        key = self._limits.key(submission.api_key_id, key_share, now)
        share = self._limits.tier(tier.name, tier_share, now)
        outcome, retry_ms = Admission.ACCEPTED, 0
        if key.tokens < 1:
            outcome, retry_ms = Admission.KEY_LIMIT, key.ms_until(1, key_share)
        elif share.tokens < 1:
            outcome, retry_ms = Admission.TIER_LIMIT, share.ms_until(1, tier_share)
        elif not self._queue.has_room(priority):
            outcome, retry_ms = Admission.QUEUE_FULL, QUEUE_RETRY_MS
        else:
            key.tokens -= 1
            share.tokens -= 1
        # The client sees the whole of its limit, which it spreads over all gateways.
        remaining = min(submission.burst, key.tokens * self._gateways)
        reset_ms = key.ms_until(key_share.burst, key_share)
        return Verdict(outcome, remaining, reset_ms, retry_ms, self._queue.ahead_of(priority))
