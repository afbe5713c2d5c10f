"""Delays between the restarts of a process."""

FIRST_S = 0.2
LONGEST_S = 5.0
SERVED_S = 1.0  # A role is ready in less than half of this, so a process that ran longer had started.
STEADY_S = 10.0  # A role that fails after this time had started successfully.
LONG_S = 30.0  # A role that ends after this time is restarted at once, whatever ended it.


class RestartBackoff:
    """Delays that double from FIRST_S to LONGEST_S while starts fail.

    A process that was killed after it had started is restarted at once, and any that ran for LONG_S.
    """

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def delay_after(self, alive_s: float, *, failed: bool) -> float:
        """The delay in seconds before the next start of a process that ran for `alive_s` seconds.

        `failed`: it ended with an error, not by a signal or with exit code 0.
        """
        if alive_s >= (STEADY_S if failed else SERVED_S):
            self._next_s = FIRST_S
            if not failed or alive_s >= LONG_S:
                return 0.0
        delay = self._next_s
        self._next_s = min(delay * 2, LONGEST_S)
        return delay
