"""What this gateway last knew of each key's bucket, for headers and for telling two refusals apart.

Redis decides; this is a bounded memory. It lets answers that never reached admission carry rate-limit headers, and
it keeps a shadow bucket at the key's base limit, so that a refusal by the lowered limit is told as lowered capacity
and not as the client's own fault. With several gateways each sees a part of the traffic, so the shadow errs towards
blaming capacity.
"""

from gateway.rate_headers import RateState

MAX_KEYS = 10_000


class KeyState:
    """One key: the last verdict and the shadow bucket. Times are monotonic seconds."""

    __slots__ = ("base_at", "base_tokens", "remaining", "seen_at")

    def __init__(self, burst: float, now: float) -> None:
        self.base_tokens = burst
        self.base_at = now
        self.remaining = burst
        self.seen_at = now

    def take_base(self, rate: float, burst: float, now: float) -> bool:
        """Take a token of the base limit; False when even the base limit is used up."""
        self.base_tokens = min(burst, self.base_tokens + max(0.0, now - self.base_at) * rate)
        self.base_at = now
        if self.base_tokens < 1:
            return False
        self.base_tokens -= 1
        return True


class KeyStates:
    """Key id -> state, the least recently added dropped first when there are too many."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._states: dict[str, KeyState] = {}
        self._max_keys = max_keys

    def __len__(self) -> int:
        return len(self._states)

    def of(self, key_id: str, base_burst: float, now: float) -> KeyState:
        """The state of a key, a full bucket when it is new here."""
        state = self._states.get(key_id)
        if state is None:
            if len(self._states) >= self._max_keys:
                del self._states[next(iter(self._states))]
            state = self._states[key_id] = KeyState(base_burst, now)
        return state

    def estimate(self, key_id: str, rate: float, burst: float, now: float) -> RateState:
        """The key's bucket now, as far as this gateway can know without asking Redis."""
        state = self._states.get(key_id)
        left = burst if state is None else min(burst, state.remaining + max(0.0, now - state.seen_at) * rate)
        reset_ms = int((burst - left) / rate * 1000) if rate > 0 else 0
        return RateState(rate, burst, left, reset_ms)
