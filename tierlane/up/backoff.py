"""How long to wait before a process that ended is started again: pure arithmetic."""

FIRST_S = 0.2
LONGEST_S = 5.0
SERVED_S = 1.0  # A role serves after less than half of this; who lived so long had started.
STEADY_S = 10.0  # A role that ends by its own fault after so long had started well, too.


class Backoff:
    """Delays in seconds that double from `FIRST_S` to `LONGEST_S` while starts fail.

    A process that was ended from outside after it had served is no failed start: it is started again at once.
    """

    def __init__(self) -> None:
        """Start at the first delay."""
        self._next_s = FIRST_S

    def delay_after(self, alive_s: float, *, failed: bool) -> float:
        """Return the delay before the next start, given how many seconds the process was alive.

        `failed`: it ended by itself with an error, not by a signal (nor by obeying one, which is exit code 0).
        """
        if alive_s >= (STEADY_S if failed else SERVED_S):
            self._next_s = FIRST_S
            if not failed:
                return 0.0
        delay = self._next_s
        self._next_s = min(delay * 2, LONGEST_S)
        return delay
