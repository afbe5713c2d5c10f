"""How long to wait before the next model process. Pure.

A process that worked is followed at once, however often something kills it. One that does not, or that never loads, is
followed ever later: a start costs as much as many batches.
"""

FIRST_S, SLOWEST_S = 0.1, 5.0
HEALTHY_AFTER_S, HEALTHY_AFTER_BATCHES = 10.0, 20
"""A process that lived or answered well for so long has worked."""
LOAD_FAILURES = 5
"""So many failures to load in a row, and the model counts as failed: it is tried rarely, and health says so."""
FAILED_RETRY_S = 30.0


class Respawn:
    """Delays of 0.1 s doubling to 5 s while processes do not work; 30 s once the model has failed to load five times."""

    def __init__(self) -> None:
        self._next_s = FIRST_S
        self._load_failures = 0

    @property
    def failed(self) -> bool:
        """Whether the model counts as one that does not load."""
        return self._load_failures >= LOAD_FAILURES

    def loaded(self) -> None:
        """A process got ready."""
        self._load_failures = 0

    def ended(self, ready_s: float | None, good_batches: int) -> float:
        """A process ended, `ready_s` seconds after it got ready (None: it never did); seconds until the next."""
        if ready_s is None:
            self._load_failures += 1
            if self.failed:
                return FAILED_RETRY_S
        elif ready_s >= HEALTHY_AFTER_S or good_batches >= HEALTHY_AFTER_BATCHES:
            self._next_s = FIRST_S
        delay_s, self._next_s = self._next_s, min(SLOWEST_S, 2 * self._next_s)
        return delay_s
