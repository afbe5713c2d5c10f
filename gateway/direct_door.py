"""Who may enter while Redis is away: the limits of admission as far as one gateway alone can hold them. No I/O."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.direct.limits import REQUEST, Charge, Charges, LocalLimits, charges_of, of_all
from gateway.direct.queue import DirectQueue
from scheduler.protocol.admission import Submission, TierLimit, Verdict
from scheduler.states import Admission

RETRY_MS = 500
"""Where it depends on others when there is room again."""

MOST_RETRY_MS = 60_000
"""Nobody is sent away for longer: Redis may be back any moment, and knows better."""

_AFTER_CONCURRENCY = (Admission.QUOTA, Admission.TIER_LIMIT)


class _Decision(NamedTuple):
    outcome: Admission
    retry_ms: int
    in_use: int
    shadowed: str = ""


class DirectDoor:
    """Judges as `admit` does, all or nothing: the client's own limits, the tier's, then room."""

    def __init__(self, queue: DirectQueue, limits: LocalLimits | None = None) -> None:
        self._queue = queue
        self._limits = LocalLimits() if limits is None else limits
        self._gateways = 1

    def open(self, gateways: int) -> None:
        """Direct mode begins, with so many gateways to share the limits with."""
        self._limits.clear()
        self._gateways = max(1, gateways)

    def close(self) -> None:
        """It is over: keep nothing that is not needed."""
        self._limits.clear()

    def judge(self, submission: Submission, tier: TierLimit, priority: int, now: float, *, in_use: int) -> Verdict:
        """The verdict on a newcomer, whose customer has `in_use` requests here; `now` is monotonic seconds."""
        charges = charges_of(submission, tier, self._gateways)
        refusal = self._refusal(submission, charges, now, in_use)
        if refusal is not None and not tier.shadow:
            decision = refusal
        elif not self._queue.has_room(priority):
            decision = _Decision(Admission.QUEUE_FULL, RETRY_MS, in_use)
        elif refusal is not None:
            decision = _Decision(Admission.ACCEPTED, 0, in_use + 1, refusal.outcome.value)
        else:
            self._limits.spend(charges.every)
            decision = _Decision(Admission.ACCEPTED, 0, in_use + 1)
        return self._verdict(submission, charges, decision, self._queue.ahead_of(priority))

    def keeps_out(
        self, together: Sequence[Submission], tier: TierLimit, priority: int, now: float, *, in_use: int
    ) -> Verdict | None:
        """The verdict on a list for all of which there is not enough; None where each may come. Nothing is spent."""
        first, tokens = together[0], sum(each.tokens for each in together)
        charges = charges_of(first, tier, self._gateways)
        refusal = self._refusal(first, charges, now, in_use)  # A limit that is first asked is asked for one.
        if refusal is None:
            of_them = of_all(charges, tokens, len(together))
            refusal = self._refusal(first, of_them, now, in_use + len(together) - 1)
        if refusal is None or tier.shadow:
            return None
        return self._verdict(first, charges, refusal._replace(in_use=in_use), self._queue.ahead_of(priority))

    def _refusal(self, submission: Submission, charges: Charges, now: float, in_use: int) -> _Decision | None:
        """What the first limit says that refuses."""
        refused = self._limits.refused(charges.every, now)
        most = max(1, submission.max_concurrency // self._gateways)
        if submission.max_concurrency and in_use >= most and (not refused or refused.refusal in _AFTER_CONCURRENCY):
            return _Decision(Admission.CONCURRENCY, RETRY_MS, in_use)
        if refused is None:
            return None
        wait_us = self._limits.level(refused).until_us(max(0, refused.limit.amount - refused.cost))
        return _Decision(refused.refusal, min(MOST_RETRY_MS, _ms(wait_us)), in_use)

    def _verdict(self, submission: Submission, charges: Charges, decision: _Decision, depth: int) -> Verdict:
        """The client is told the whole of its limits, which it spreads over all gateways."""
        requests = self._left(charges.customer, REQUEST, submission.burst)
        if charges.key is not None:
            requests = min(requests, self._left(charges.key, REQUEST, submission.key_burst))
        tokens, tokens_ms = 0.0, 0
        if charges.tokens is not None:
            tokens, tokens_ms = self._left(charges.tokens, 1, submission.tokens_per_minute)
        in_use = decision.in_use
        if submission.max_concurrency:
            in_use = min(submission.max_concurrency, in_use * self._gateways)
        quotas = [self._quota(charge, each[1]) for charge, each in zip(charges.quotas, submission.quotas, strict=True)]
        outcome, retry_ms, _, shadowed = decision
        return Verdict(outcome, *requests, retry_ms, depth, "", tokens, tokens_ms, in_use, quotas, shadowed)

    def _left(self, charge: Charge, unit: int, most: float) -> tuple[float, int]:
        """What is left of a bucket, and milliseconds until it is full."""
        level = self._limits.level(charge)
        left = max(0.0, (charge.limit.amount - level.used) / unit)
        return min(most, left * self._gateways), _ms(level.until_us(0))

    def _quota(self, charge: Charge, amount: int) -> tuple[int, int]:
        """What is left of a quota, and milliseconds until it starts anew."""
        level = self._limits.level(charge)
        left = max(0, int(charge.limit.amount - level.used))
        return min(amount, left * self._gateways), _ms(level.left_us)


def _ms(microseconds: float) -> int:
    return int(microseconds / 1000) + 1 if microseconds else 0
