"""The limits of each customer at this gateway: in force, left, and whether a rejection is the customer's own fault.

Redis decides; this is a bounded memory of what it said, so that responses which never reached admission carry
rate-limit headers. Shadow buckets at the base limits tell a rejection by a lowered limit (lowered capacity) from the
client's own. While nothing is lowered the shadow is what Redis says; from then on it is counted here. With several
gateways each sees a part of the traffic, so the shadow errs towards blaming capacity. No I/O.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from gateway.auth.service_tier import own
from gateway.catalog import IdentityView
from gateway.http.errors import RejectionError
from gateway.http.response import Headers
from gateway.inference.admission import ENTERED
from gateway.limits.capacity import LiveLimits
from gateway.limits.demand import DemandMeter, fill
from gateway.limits.rejections import LOWERED, NO_ROOM, refusal
from ratelimit.effective import EffectiveLimits, LimitReading, RemainingLimits, effective
from ratelimit.headers import rate_headers, rate_lines
from scheduler.protocol.admission import Submission, Verdict
from scheduler.states import Admission

MAX_STATES = 10_000
DAY_MS = 86_400_000  # What is told where nothing comes back at all, as Redis tells it.
FRESH = 0.25  # Of a bucket of which nothing is known: as much as Redis trusts in one that it has lost.


class Shadow:
    """A bucket at a base limit. Times are monotonic seconds."""

    __slots__ = ("at", "level")

    def __init__(self, size: float, now: float) -> None:
        self.level = size
        self.at = now

    def set(self, level: float, now: float) -> None:
        """It is known how much is there."""
        self.level = level
        self.at = now

    def has(self, cost: float, rate: float, size: float, now: float) -> bool:
        """Whether so much is there now; what is larger than the bucket needs it full."""
        self.level = min(size, self.level + max(0.0, now - self.at) * rate)
        self.at = now
        return self.level >= min(cost, size)


class _State:
    """One customer, or one key with a limit of its own."""

    __slots__ = ("left", "requests", "seen_at", "tokens")

    def __init__(self, burst: float, tokens_per_minute: float, now: float) -> None:
        self.requests = Shadow(burst, now)
        self.tokens = Shadow(tokens_per_minute, now)
        self.left = RemainingLimits(burst * FRESH, 0, tokens_per_minute * FRESH)
        self.seen_at = now


class LocalBuckets:
    """Customers and keys -> state, the one that was added first dropped when there are too many."""

    def __init__(self, max_states: int = MAX_STATES) -> None:
        # A plain dict looks for its first entry over all that were deleted before it: 3 us where every customer is new.
        self._states: OrderedDict[str, _State] = OrderedDict()
        self._max_states = max_states

    def __len__(self) -> int:
        return len(self._states)

    def note(self, identity: IdentityView, look: LimitReading, now: float, *, lowered: bool) -> None:
        """Remember what Redis said, `lowered`: of limits that are not the base limits now."""
        state, left = self._customer(identity, now), RemainingLimits.of(look)
        if identity.quotas and not left.quotas:  # It was said in direct mode, where nobody knows of quotas.
            left = left._replace(quotas=self._quotas(state, effective(identity), now))
        if identity.key_rate > 0:  # What was said is of the key's own bucket, where that holds less.
            own = self._own(identity, now)
            own.left, own.seen_at = left, now
            if not lowered:
                own.requests.set(left.remaining, now)
            left = left._replace(remaining=max(left.remaining, state.left.remaining - 1))
        state.left, state.seen_at = left, now
        if not lowered:
            state.requests.set(left.remaining, now)
            state.tokens.set(left.tokens, now)

    def base_allows(self, identity: IdentityView, tokens: int, now: float, *, entered: bool) -> bool:
        """Whether the base limits have room for a request of so many tokens. What has it, or has `entered`, takes it."""
        base, state = effective(identity), self._customer(identity, now)
        buckets = [(state.requests, 1.0, base.rate, base.burst)]
        if base.tokens_per_minute:
            buckets.append((state.tokens, float(tokens), base.tokens_per_minute / 60, base.tokens_per_minute))
        if base.key_rate > 0:
            buckets.append((self._own(identity, now).requests, 1.0, base.key_rate, base.key_burst))
        allowed = True
        for shadow, cost, rate, size in buckets:  # Each of them is refilled, whatever the others say.
            allowed = shadow.has(cost, rate, size, now) and allowed
        if allowed or entered:
            for shadow, cost, _, size in buckets:
                shadow.level = max(-size, shadow.level - cost)
        return allowed

    def settle(self, identity: IdentityView, tokens: int) -> None:
        """Give back tokens that a request did not use; below 0 where it used more than was thought."""
        state = self._states.get(identity.customer_id)
        if state is not None:
            state.tokens.level += tokens

    def estimate(self, identity: IdentityView, limits: EffectiveLimits, now: float) -> RemainingLimits:
        """What is left now, as far as this gateway can know without asking Redis."""
        state = self._customer(identity, now)
        remaining, reset_ms = _refilled(state.left.remaining, limits.rate, limits.burst, now - state.seen_at)
        if limits.key_rate > 0:
            own = self._own(identity, now)
            told = _refilled(own.left.remaining, limits.key_rate, limits.key_burst, now - own.seen_at)
            remaining, reset_ms = min((remaining, reset_ms), told)
        pace = limits.tokens_per_minute
        tokens, tokens_reset_ms = _refilled(state.left.tokens, pace / 60, pace, now - state.seen_at)
        quotas = self._quotas(state, limits, now)
        return RemainingLimits(remaining, reset_ms, tokens, tokens_reset_ms, state.left.in_use, quotas)

    def _quotas(self, state: _State, limits: EffectiveLimits, now: float) -> tuple[tuple[int, int], ...]:
        """What was last known; a window that has ended since is not known any more than one that was never seen."""
        elapsed_ms = int((now - state.seen_at) * 1000)
        known = state.left.quotas
        if len(known) != len(limits.quotas) or any(reset_ms <= elapsed_ms for _, reset_ms in known):
            return ()
        return tuple((left, reset_ms - elapsed_ms) for left, reset_ms in known)

    def _customer(self, identity: IdentityView, now: float) -> _State:
        tokens = float(identity.tokens_per_minute or 0)
        return self._of(identity.customer_id, identity.burst, tokens, now)

    def _own(self, identity: IdentityView, now: float) -> _State:
        return self._of(f"key {identity.key_id}", max(1.0, identity.key_burst), 0.0, now)

    def _of(self, name: str, burst: float, tokens: float, now: float) -> _State:
        state = self._states.get(name)
        if state is None:
            if len(self._states) >= self._max_states:
                self._states.popitem(last=False)
            state = self._states[name] = _State(burst, tokens, now)
        return state


def _refilled(level: float, rate: float, size: float, elapsed_s: float) -> tuple[float, int]:
    """What a bucket holds after so long, and ms until it is full."""
    level = min(size, level + max(0.0, elapsed_s) * rate)
    if level >= size:
        return level, 0
    return level, int(min(DAY_MS, (size - level) / rate * 1000)) if rate > 0 else DAY_MS


MAX_LIMITS = 10_000


class CustomerLimits:
    """All customers'."""

    def __init__(
        self, limits: LiveLimits, demand_meter: DemandMeter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._live = limits
        self._demand_meter = demand_meter
        self._clock = clock
        self._known = LocalBuckets()
        # By key: most requests come from keys whose limits were worked out a moment ago.
        self._limits: dict[str, tuple[IdentityView, float, EffectiveLimits]] = {}

    def factor(self, identity: IdentityView) -> float:
        """The part of its base limits that the identity has now, 0..1."""
        return self._live.factor(own(identity).tier)

    def limits(self, identity: IdentityView) -> EffectiveLimits:
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
            self._demand_meter.shadowed(tier)
        if entered:
            self._demand_meter.passed(tier, factor, _filled(submission, verdict))
        if outcome is Admission.BACKPRESSURE:  # Redis was too full to look at any limit.
            self._demand_meter.passed(tier, factor)
            return False
        self._known.note(identity, verdict, now, lowered=factor < 1)
        if not (entered or outcome in LOWERED or outcome in NO_ROOM):
            return False
        allows = factor >= 1 or self._known.base_allows(identity, submission.tokens, now, entered=entered)
        if allows and outcome in NO_ROOM:  # Nothing was spent: who insists counts at its base rate.
            self._demand_meter.passed(tier, 1.0, 1.0)
        return allows and outcome in LOWERED and factor < 1

    def settle(self, identity: IdentityView, unused_tokens: int) -> None:
        """A request has ended and used so many tokens less than it was charged (below 0: more)."""
        self._known.settle(identity, unused_tokens)

    def refusal(self, identity: IdentityView, verdict: Verdict, *, base_limit_allows: bool) -> RejectionError:
        """The error for a verdict that refuses."""
        return refusal(
            verdict,
            base_limit_allows=base_limit_allows,
            limits=self.limits(identity),
            factor=self.factor(identity),
            drain_rps=self._live.drain_rps(identity.tier),
            pressure=self._live.pressure(identity.tier),
        )

    def looked(self, identity: IdentityView, look: LimitReading) -> None:
        """Remember a look at the limits that was no verdict."""
        self._known.note(identity, look, self._clock(), lowered=self.factor(identity) < 1)

    def left(self, identity: IdentityView, limits: EffectiveLimits, verdict: Verdict | None = None) -> RemainingLimits:
        """What is left of `limits`: as the verdict says, else as far as is known here."""
        if verdict is None or verdict.outcome is Admission.BACKPRESSURE or len(verdict.quotas) != len(limits.quotas):
            return self._known.estimate(identity, limits, self._clock())
        return RemainingLimits.of(verdict)

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
