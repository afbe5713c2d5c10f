"""What this gateway last knew of each customer's limits, for headers and for telling two refusals apart.

Redis decides; this is a bounded memory. It lets answers that never reached admission carry rate-limit headers, and it
keeps shadow buckets at the base limits of requests and of tokens, so that a refusal by a lowered limit is told as
lowered capacity and not as the client's own fault. While nothing is lowered the shadow is what Redis says; from then on
it is counted here. With several gateways each sees a part of the traffic, so the shadow errs towards blaming capacity.
"""

from collections import OrderedDict

from gateway.catalog import IdentityView
from ratelimit.effective import Effective, Left, LimitLook, effective

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
        self.left = Left(burst * FRESH, 0, tokens_per_minute * FRESH)
        self.seen_at = now


class KnownLimits:
    """Customers and keys -> state, the one that was added first dropped when there are too many."""

    def __init__(self, max_states: int = MAX_STATES) -> None:
        # A plain dict looks for its first entry over all that were deleted before it: 3 us where every customer is new.
        self._states: OrderedDict[str, _State] = OrderedDict()
        self._max_states = max_states

    def __len__(self) -> int:
        return len(self._states)

    def note(self, identity: IdentityView, look: LimitLook, now: float, *, lowered: bool) -> None:
        """Remember what Redis said, `lowered`: of limits that are not the base limits now."""
        state, left = self._customer(identity, now), Left.of(look)
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

    def estimate(self, identity: IdentityView, limits: Effective, now: float) -> Left:
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
        return Left(remaining, reset_ms, tokens, tokens_reset_ms, state.left.in_use, quotas)

    def _quotas(self, state: _State, limits: Effective, now: float) -> tuple[tuple[int, int], ...]:
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
