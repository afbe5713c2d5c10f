"""Delays before the next model process, as pure arithmetic.

A process that worked is restarted after 0.1 s, however often it is killed. One that crashes or does not load is restarted
with growing delays: a start costs as much as many batches.
"""

FIRST_RESPAWN_S, SLOWEST_RESPAWN_S = 0.1, 5.0
HEALTHY_AFTER_S, HEALTHY_AFTER_BATCHES = 10.0, 20
"""A process that was ready this long, or answered this many good batches, has worked."""
LOAD_FAILURES = 5
"""After this many failed loads in a row the model counts as failed: it is retried rarely, and health reports it."""
FAILED_RETRY_S = 30.0


class Respawn:
    """Delays of 0.1 s doubling to 5 s while processes do not work; 30 s once the model has failed to load five times."""

    def __init__(self) -> None:
        self._next_s = FIRST_RESPAWN_S
        self._load_failures = 0

    @property
    def failed(self) -> bool:
        """Whether the model counts as one that does not load."""
        return self._load_failures >= LOAD_FAILURES

    def loaded(self) -> None:
        """A process became ready."""
        self._load_failures = 0

    def ended(self, ready_s: float | None, good_batches: int) -> float:
        """A process ended, `ready_s` seconds after it became ready (None: it never did); seconds until the next."""
        if ready_s is None:
            self._load_failures += 1
            if self.failed:
                return FAILED_RETRY_S
        elif ready_s >= HEALTHY_AFTER_S or good_batches >= HEALTHY_AFTER_BATCHES:
            self._next_s = FIRST_RESPAWN_S
        delay_s, self._next_s = self._next_s, min(SLOWEST_RESPAWN_S, 2 * self._next_s)
        return delay_s
