"""Where each customer stands with its limits at this gateway: what is in force, what is told, and who is to blame.

It brings together the tier factors, what Redis last said, and the shadow of the base limits; verdicts go in, headers and
refusals come out. No I/O.
"""

import time
from collections.abc import Callable

from gateway.auth.service_tier import own
from gateway.catalog import IdentityView
from gateway.http.errors import Refusal
from gateway.http.response import Headers
from gateway.inference.admission import ENTERED
from gateway.limits.capacity import LiveLimits
from gateway.limits.customer_limits import KnownLimits
from gateway.limits.demand import Meter, fill
from gateway.limits.rejections import LOWERED, NO_ROOM, refusal
from ratelimit.effective import Effective, Left, LimitLook, effective
from ratelimit.headers import rate_headers, rate_lines
from scheduler.protocol.admission import Submission, Verdict
from scheduler.states import Admission

MAX_LIMITS = 10_000


class Standing:
    """All customers'."""

    def __init__(self, limits: LiveLimits, meter: Meter, clock: Callable[[], float] = time.monotonic) -> None:
        self._live = limits
        self._meter = meter
        self._clock = clock
        self._known = KnownLimits()
        # By key: most requests come from keys whose limits were worked out a moment ago.
        self._limits: dict[str, tuple[IdentityView, float, Effective]] = {}

    def factor(self, identity: IdentityView) -> float:
        """The part of its base limits that the identity has now, 0..1."""
        return self._live.factor(own(identity).tier)

    def limits(self, identity: IdentityView) -> Effective:
        """The limits of the identity as lowered now."""
        identity = own(identity)
        factor = self._live.factor(identity.tier)
        known = self._limits.get(identity.key_id)
        if known is not None and known[0] is identity and known[1] == factor:
            return known[2]
        if len(self._limits) >= MAX_LIMITS:
            self._limits.clear()
        limits = effective(identity, factor)
        self._limits[identity.key_id] = (identity, factor, limits)
        return limits

    def judged(self, identity: IdentityView, submission: Submission, verdict: Verdict) -> bool:
        """Note and count a verdict. True where only a lowered limit kept the request out: base limits would let it in."""
        now, tier, outcome = self._clock(), identity.tier, verdict.outcome
        # As it was when admission was asked: one that fell since would make a flood of what came before.
        factor = submission.rate / identity.requests_per_second if identity.requests_per_second else 1.0
        entered = outcome in ENTERED
        if verdict.shadowed:
            self._meter.shadowed(tier)
        if entered:
            self._meter.passed(tier, factor, _filled(submission, verdict))
        if outcome is Admission.BACKPRESSURE:  # Redis was too full to look at any limit.
            self._meter.passed(tier, factor)
            return False
        self._known.note(identity, verdict, now, lowered=factor < 1)
        if not (entered or outcome in LOWERED or outcome in NO_ROOM):
            return False
        allows = factor >= 1 or self._known.base_allows(identity, submission.tokens, now, entered=entered)
        if allows and outcome in NO_ROOM:  # Nothing was spent: who insists counts at its base rate.
            self._meter.passed(tier, 1.0, 1.0)
        return allows and outcome in LOWERED and factor < 1

    def settle(self, identity: IdentityView, unused_tokens: int) -> None:
        """A request has ended and used so many tokens less than it was charged (below 0: more)."""
        self._known.settle(identity, unused_tokens)

    def refusal(self, identity: IdentityView, verdict: Verdict, *, base_limit_allows: bool) -> Refusal:
        """The error for a verdict that refuses."""
        return refusal(
            verdict,
            base_limit_allows=base_limit_allows,
            limits=self.limits(identity),
            factor=self.factor(identity),
            drain_rps=self._live.drain_rps(identity.tier),
            pressure=self._live.pressure(identity.tier),
        )

    def looked(self, identity: IdentityView, look: LimitLook) -> None:
        """Remember a look at the limits that was no verdict."""
        self._known.note(identity, look, self._clock(), lowered=self.factor(identity) < 1)

    def left(self, identity: IdentityView, limits: Effective, verdict: Verdict | None = None) -> Left:
        """What is left of `limits`: as the verdict says, else as far as is known here."""
        if verdict is None or verdict.outcome is Admission.BACKPRESSURE or len(verdict.quotas) != len(limits.quotas):
            return self._known.estimate(identity, limits, self._clock())
        return Left.of(verdict)

    def lines(self, identity: IdentityView, verdict: Verdict | None) -> str:
        """The rate-limit headers of an answer, as they are sent."""
        limits = self.limits(identity)
        return rate_lines(limits, self.left(identity, limits, verdict))

    def headers(self, identity: IdentityView, verdict: Verdict | None = None) -> Headers:
        """The rate-limit headers of an answer."""
        limits = self.limits(identity)
        return rate_headers(limits, self.left(identity, limits, verdict))


def _filled(submission: Submission, verdict: Verdict) -> float:
    """How full, 0..1, the emptiest of the customer's buckets was."""
    filled = fill(verdict.remaining, min(submission.burst, submission.key_burst or submission.burst))
    if submission.tokens_per_minute:
        filled = min(filled, (verdict.tokens_left + submission.tokens) / submission.tokens_per_minute)
    return filled
