"""How long to wait before a process that died is started again: pure arithmetic."""

FIRST_S = 0.2
LONGEST_S = 5.0
STEADY_S = 10.0  # A process that lived this long had started well, so its next death is a new story.


class Backoff:
    """Delays in seconds that double from `FIRST_S` to `LONGEST_S` and start over after a steady run."""

    def __init__(self) -> None:
        """Start at the first delay."""
        self._next_s = FIRST_S

    def delay_after(self, alive_s: float) -> float:
        """Return the delay before the next start, given how many seconds the process was alive."""
        if alive_s >= STEADY_S:
            self._next_s = FIRST_S
        delay = self._next_s
        self._next_s = min(delay * 2, LONGEST_S)
        return delay
