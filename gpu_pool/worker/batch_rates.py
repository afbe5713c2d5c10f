"""The busy share of a model that runs batches, and the rate at which it serves requests."""

from collections import deque

SPANNED_RUNS = 3
"""A served rate spans at least this many runs."""


class BusyShare:
    """Share of the last seconds in which a batch ran. Times are seconds of one monotonic clock."""

    def __init__(self, window_s: float = 2.0) -> None:
        self._window_s = window_s
        self._runs: deque[tuple[float, float]] = deque()
        self._since: float | None = None

    def start(self, now: float) -> None:
        """A batch begins."""
        self._since = now

    def stop(self, now: float) -> None:
        """The batch ended."""
        if self._since is not None:
            self._runs.append((self._since, now))
        self._since = None
        self._drop_old(now)

    def share(self, now: float) -> float:
        """Busy time divided by the window, 0 to 1."""
        self._drop_old(now)
        edge = now - self._window_s
        busy = sum(end - max(start, edge) for start, end in self._runs)
        if self._since is not None:
            busy += now - max(self._since, edge)
        return min(1.0, busy / self._window_s)

    def _drop_old(self, now: float) -> None:
        while self._runs and self._runs[0][1] <= now - self._window_s:
            self._runs.popleft()


class ServedRate:
    """Requests/s over the last completed runs: the rate of a model whose runs follow one another.

    The window is shorter, by one run, than the backlog after which the rate is used (`ratelimit/capacity.py`), so all
    of it is under backlog; it is no shorter, since the speed of a model on a CPU varies from second to second.
    """

    def __init__(self, window_s: float = 2.25) -> None:
        self._window_s = window_s
        self._ended: deque[tuple[float, int]] = deque()

    def ended(self, now: float, size: int) -> None:
        """A batch of `size` ended at `now` (s)."""
        self._ended.append((now, size))
        while len(self._ended) > SPANNED_RUNS + 1 and self._ended[1][0] < now - self._window_s:
            self._ended.popleft()

    @property
    def rps(self) -> float:
        """From the end of the first kept run to that of the last; 0 while only one is known."""
        if len(self._ended) < 2:
            return 0.0
        span_s = self._ended[-1][0] - self._ended[0][0]
        served = sum(size for _, size in self._ended) - self._ended[0][1]
        return served / span_s if span_s > 0 else 0.0
