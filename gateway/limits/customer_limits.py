"""The limits of each customer at this gateway: in force, left, and whether a rejection is the customer's own fault.

Redis decides; this is a bounded memory of its results, so that responses to requests that never reached admission carry
rate-limit headers. Shadow buckets at the base limits distinguish a rejection by a reduced limit from one that the base
limit would have returned as well. While nothing is reduced the shadow is the level in Redis; from then on it is counted
here. With several gateways each sees a part of the traffic, so the shadow errs towards blaming capacity. No I/O.
"""

import time
from collections.abc import Callable, Iterable

from gateway.auth.service_tier import own
from gateway.http.errors import RejectionError
from gateway.http.response import Headers
from gateway.inference.admission import ENTERED
from gateway.limits.capacity import LiveLimits
from gateway.limits.demand import DemandMeter, bucket_fill
from gateway.limits.rejections import LOWERED, NO_ROOM, rejection_error
from ledger.catalog.snapshot import Identity
from ratelimit.headers import rate_headers, rate_lines
from ratelimit.limits import (
    FRESH,
    REQUEST_RATE,
    Bucket,
    EffectiveLimits,
    Level,
    RemainingLimits,
    effective,
)
from ratelimit.token_bucket import LocalBucket, refilled
from scheduler.bounded_dict import BoundedDict
from scheduler.protocol.admission import Submission, Verdict
from scheduler.states import Admission

MAX_STATES = 10_000

MAX_LIMITS = 10_000


class _State:
    """One customer, or one key with a limit of its own: the last known levels, and a shadow of each bucket at the base limits.

    Most requests never need the shadows, so `known` (the last levels at base limits) and `unused` (tokens returned since)
    are applied to them only when they are read.
    """

    __slots__ = ("_shadows", "known", "left", "seen_at", "unused")

    def __init__(self, buckets: Iterable[Bucket], now: float) -> None:
        self._shadows = {bucket.kind: LocalBucket(bucket.size, now) for bucket in buckets}
        self.left = RemainingLimits([Level(bucket.size * FRESH, 0) for bucket in buckets])
        self.seen_at = now
        self.known: tuple[Iterable[Bucket], Iterable[Level], float] | None = None
        self.unused = 0

    def shadow(self, bucket: Bucket, now: float) -> LocalBucket:
        """The shadow of one bucket, which is full if the customer has just received the limit."""
        if self.known is not None:
            (buckets, levels, at), self.known = self.known, None
            for each, level in zip(buckets, levels, strict=False):
                self._shadow(each, at).set(level.left, at)
        if self.unused:
            for kind, shadow in self._shadows.items():
                if kind.settled:
                    shadow.level += self.unused
            self.unused = 0
        return self._shadow(bucket, now)

    def _shadow(self, bucket: Bucket, now: float) -> LocalBucket:
        found = self._shadows.get(bucket.kind)
        if found is None:
            found = self._shadows[bucket.kind] = LocalBucket(bucket.size, now)
        return found

    def set(self, buckets: Iterable[Bucket], levels: Iterable[Level], now: float) -> None:
        """Store the levels of base limits that Redis reported."""
        self.known, self.unused = (buckets, levels, now), 0


class LocalBuckets:
    """Customers and keys -> state; the oldest entry is dropped when there are too many."""

    def __init__(self, max_states: int = MAX_STATES) -> None:
        self._states: BoundedDict[str, _State] = BoundedDict(max_states)

    def __len__(self) -> int:
        return len(self._states)

    def note(
        self, identity: Identity, limits: EffectiveLimits, left: RemainingLimits, now: float, *, reduced: bool
    ) -> None:
        """Remember what Redis has left of `limits`, which are `reduced` below the base."""
        state, buckets = self._customer(identity, now), limits.buckets
        if state.left is left:  # Noted with another verdict of the same call.
            return
        if limits.quotas and not left.quotas:  # In direct mode nothing is known of quotas.
            left = left._replace(quotas=_unexpired(state, limits, now))
        if limits.key is not None and left.buckets:  # Of requests it is the level of the key's own bucket, where lower.
            own = self._key(identity, now)
            requests, *others = left.buckets
            own.left, own.seen_at = RemainingLimits([requests]), now
            if not reduced:
                own.set([limits.key], [requests], now)
            least = state.left.buckets[0].left - 1 if state.left.buckets else 0.0
            left = left._replace(buckets=[requests._replace(left=max(requests.left, least)), *others])
        state.left, state.seen_at = left, now
        if not reduced:
            state.set(buckets, left.buckets, now)

    def base_allows(self, identity: Identity, submission: Submission, now: float, *, entered: bool) -> bool:
        """Whether the base limits have room for a request. If they have, or it has `entered`, it is charged."""
        base = effective(identity)
        state = self._customer(identity, now)
        shadows = [(state.shadow(bucket, now), bucket.kind.units(submission), bucket) for bucket in base.buckets]
        if base.key is not None:
            shadows.append((self._key(identity, now).shadow(base.key, now), 1, base.key))
        allowed = True
        for shadow, cost, bucket in shadows:  # Each of them is refilled, whatever the others say.
            allowed = shadow.has(cost, bucket, now) and allowed
        if allowed or entered:
            for shadow, cost, bucket in shadows:
                shadow.level = max(-bucket.size, shadow.level - cost)
        return allowed

    def settle(self, identity: Identity, tokens: int) -> None:
        """Return tokens that a request did not use; below 0 where it used more than was estimated."""
        state = self._states.get(identity.customer_id)
        if state is not None:
            state.unused += tokens

    def estimate(self, identity: Identity, limits: EffectiveLimits, now: float) -> RemainingLimits:
        """What is left now, as far as this gateway can know without a call to Redis."""
        state = self._customer(identity, now)
        elapsed_s, known = now - state.seen_at, list(state.left.buckets)
        known += [Level(bucket.size * FRESH, 0) for bucket in limits.buckets[len(known) :]]
        levels = [refilled(level, bucket, elapsed_s) for level, bucket in zip(known, limits.buckets, strict=False)]
        if limits.key is not None:
            own = self._key(identity, now)
            levels[0] = min(levels[0], refilled(own.left.buckets[0], limits.key, now - own.seen_at))
        return RemainingLimits(levels, state.left.in_use, _unexpired(state, limits, now))

    def _customer(self, identity: Identity, now: float) -> _State:
        name = identity.customer_id
        return self._states.get(name) or self._add(name, effective(identity).buckets, now)

    def _key(self, identity: Identity, now: float) -> _State:
        name = f"key {identity.key_id}"
        state = self._states.get(name)
        if state is None:
            base = effective(identity).key
            state = self._add(name, () if base is None else (base,), now)
        return state

    def _add(self, name: str, buckets: Iterable[Bucket], now: float) -> _State:
        state = self._states[name] = _State(buckets, now)
        return state


def _unexpired(state: _State, limits: EffectiveLimits, now: float) -> tuple[tuple[int, int], ...]:
    """The quotas as last known; empty once a window has ended since."""
    elapsed_ms = int((now - state.seen_at) * 1000)
    known = state.left.quotas
    if len(known) != len(limits.quotas) or any(reset_ms <= elapsed_ms for _, reset_ms in known):
        return ()
    return tuple((left, reset_ms - elapsed_ms) for left, reset_ms in known)


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
        self._limits: dict[str, tuple[Identity, float, EffectiveLimits]] = {}
        # By key, for the verdicts of one call: what remained, and its headers.
        self._lines: dict[str, tuple[EffectiveLimits, RemainingLimits, str]] = {}

    def factor(self, identity: Identity) -> float:
        """The part of its base limits that the identity has now, 0..1."""
        return self._live.factor(own(identity).tier)

    def limits(self, identity: Identity) -> EffectiveLimits:
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

    def judged(self, identity: Identity, submission: Submission, verdict: Verdict) -> bool:
        """Note and count a verdict. True where only a lowered limit kept the request out: base limits would let it in."""
        now, tier, outcome = self._clock(), identity.tier, verdict.outcome
        # The factor at the time of the call: a lower one since then would count earlier requests as excess demand.
        factor = submission.limits.buckets[0].rate / (identity.limits[REQUEST_RATE] or 1.0)
        entered = outcome in ENTERED
        if verdict.shadowed:
            self._demand_meter.shadowed(tier)
        if entered:
            self._demand_meter.passed(tier, factor, 1.0 if factor >= 1 else _filled(submission, verdict))
        if outcome is Admission.BACKPRESSURE:  # Redis was too full to look at any limit.
            self._demand_meter.passed(tier)
            return False
        self._known.note(identity, submission.limits, verdict.left, now, reduced=factor < 1)
        if not (entered or outcome in LOWERED or outcome in NO_ROOM):
            return False
        allows = factor >= 1 or self._known.base_allows(identity, submission, now, entered=entered)
        if allows and outcome in NO_ROOM:  # Nothing was spent: who insists counts at its base rate.
            self._demand_meter.passed(tier)
        only_reduced = allows and outcome in LOWERED and factor < 1
        if only_reduced:
            self._demand_meter.held_back(tier)
        return only_reduced

    def settle(self, identity: Identity, unused_tokens: int) -> None:
        """A request has ended and used so many tokens less than it was charged (below 0: more)."""
        self._known.settle(identity, unused_tokens)

    def rejection_error(self, identity: Identity, verdict: Verdict, *, base_limit_allows: bool) -> RejectionError:
        """The error for a verdict that refuses."""
        return rejection_error(
            verdict,
            base_limit_allows=base_limit_allows,
            limits=self.limits(identity),
            factor=self.factor(identity),
            drain_rps=self._live.drain_rps(identity.tier),
            pressure=self._live.pressure(identity.tier),
        )

    def looked(self, identity: Identity, limits: EffectiveLimits, left: RemainingLimits) -> None:
        """Remember a look at the limits that was no verdict."""
        self._known.note(identity, limits, left, self._clock(), reduced=self.factor(identity) < 1)

    def left(self, identity: Identity, limits: EffectiveLimits, verdict: Verdict | None = None) -> RemainingLimits:
        """What is left of `limits`: as the verdict says, else as far as is known here."""
        left = verdict.left if verdict is not None else RemainingLimits()
        if len(left.buckets) != len(limits.buckets) or len(left.quotas) != len(limits.quotas):
            return self._known.estimate(identity, limits, self._clock())
        return left

    def lines(self, identity: Identity, verdict: Verdict | None) -> str:
        """The rate-limit headers of an answer, as they are sent."""
        limits = self.limits(identity)
        left = self.left(identity, limits, verdict)
        known = self._lines.get(identity.key_id)
        if known is not None and known[0] is limits and known[1] is left:
            return known[2]
        if len(self._lines) >= MAX_LIMITS:
            self._lines.clear()
        lines = rate_lines(limits, left)
        self._lines[identity.key_id] = (limits, left, lines)
        return lines

    def headers(self, identity: Identity, verdict: Verdict | None = None) -> Headers:
        """The rate-limit headers of an answer."""
        limits = self.limits(identity)
        return rate_headers(limits, self.left(identity, limits, verdict))


def _filled(submission: Submission, verdict: Verdict) -> float:
    """How full, 0..1, the emptiest of the customer's buckets was."""
    (requests, *others), levels = submission.limits.buckets, verdict.left.buckets
    size = min(requests.size, submission.limits.key.size) if submission.limits.key else requests.size
    cells = submission.limits.spread  # A verdict has the levels of one cell.
    filled = bucket_fill(levels[0].left * cells if levels else 0.0, size)
    for bucket, level in zip(others, levels[1:], strict=False):
        filled = min(filled, (level.left * cells + bucket.kind.units(submission)) / bucket.size)
    return filled
