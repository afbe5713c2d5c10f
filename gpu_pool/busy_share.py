"""What share of the last seconds the model was running. Pure: every call is given the time."""

from collections import deque


class BusyShare:
    """Times are seconds of one monotonic clock, never going back."""

    def __init__(self, window_s: float = 2.0) -> None:
        self._window_s = window_s
        self._runs: deque[tuple[float, float]] = deque()
        self._since: float | None = None

    def start(self, now: float) -> None:
        """A batch begins."""
        self._since = now

    def stop(self, now: float) -> None:
        """The batch ended, in whatever way."""
        if self._since is not None:
            self._runs.append((self._since, now))
        self._since = None
        self._drop_old(now)

    def share(self, now: float) -> float:
        """Busy time over window, 0 to 1."""
        self._drop_old(now)
        edge = now - self._window_s
        busy = sum(end - max(start, edge) for start, end in self._runs)
        if self._since is not None:
            busy += now - max(self._since, edge)
        return min(1.0, busy / self._window_s)

    def _drop_old(self, now: float) -> None:
        while self._runs and self._runs[0][1] <= now - self._window_s:
            self._runs.popleft()
