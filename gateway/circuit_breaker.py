"""A circuit breaker: notices that a dependency does not answer, and that it answers again. No I/O, no clock of its own.

    closed     calls are made; so many failures in a row, or half a second of trying without a success, open it
    open       no calls, until a jittered moment at which one probe is let through
    half open  one probe is under way; a success closes, a failure opens again; a probe that is lost is a failure

Whoever calls reports each call: `begun`, then `succeeded` or `failed`. A success closes it from any state, since it
is the only thing that proves the dependency well.
"""

import random
from collections.abc import Callable
from enum import StrEnum

MAX_FAILURES = 3
SILENCE_S = 0.5
PROBE_AFTER_S = (0.1, 0.4)
PROBE_TIMEOUT_S = 0.5


class BreakerState(StrEnum):
    """Where a breaker stands."""

    CLOSED = "closed"  # Calls are made.
    OPEN = "open"  # No calls: they would only wait to fail.
    HALF_OPEN = "half_open"  # One probe is under way.


class Breaker:
    """One dependency's breaker. Times are monotonic seconds; `silence_s` of None leaves only the count of failures."""

    def __init__(
        self,
        *,
        max_failures: int = MAX_FAILURES,
        silence_s: float | None = SILENCE_S,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._max_failures = max_failures
        self._silence_s = silence_s
        self._draw = draw
        self._trying_since: float | None = None  # When the first call after the last success was begun.
        self._next_at = 0.0  # Open: when a probe may go. Half open: when the probe counts as lost.
        self.state = BreakerState.CLOSED
        self.failures = 0  # In a row.
        self.opened = 0  # How often it opened, probes aside.

    @property
    def well(self) -> bool:
        """Closed, and the last call that ended was a success."""
        return self.state is BreakerState.CLOSED and self.failures == 0

    def begun(self, now: float) -> None:
        """A call is made."""
        if self._trying_since is None:
            self._trying_since = now

    def succeeded(self) -> None:
        """A call was answered."""
        self._trying_since = None
        self.failures = 0
        self.state = BreakerState.CLOSED

    def failed(self, now: float) -> None:
        """A call was not answered, or not in time."""
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._open(now)
        else:
            self.look(now)

    def stood_still(self, now: float) -> None:
        """Our own process did not run for a while: the silence until now says nothing of the dependency."""
        if self._trying_since is not None:
            self._trying_since = now

    def look(self, now: float) -> BreakerState:
        """Where it stands now: time alone can open it, and can end a probe that nobody reports on."""
        if self.state is BreakerState.CLOSED and (self.failures >= self._max_failures or self._silent(now)):
            self.opened += 1
            self._open(now)
        elif self.state is BreakerState.HALF_OPEN and now >= self._next_at:
            self._open(now)
        return self.state

    def may_probe(self, now: float) -> bool:
        """Whether the caller is to make the one probe now; True makes it half open, and the caller reports the end."""
        if self.look(now) is not BreakerState.OPEN or now < self._next_at:
            return False
        self.state = BreakerState.HALF_OPEN
        self._next_at = now + PROBE_TIMEOUT_S
        return True

    def may_call(self, now: float) -> bool:
        """Whether a call may be made now, as a probe where it is not closed."""
        return self.look(now) is BreakerState.CLOSED or self.may_probe(now)

    def _silent(self, now: float) -> bool:
        since = self._trying_since
        return self._silence_s is not None and since is not None and now - since >= self._silence_s

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        # Jittered, so that the gateways of a pool do not all knock at the same moment.
        self._next_at = now + self._draw(*PROBE_AFTER_S)
