"""Batch concurrency of a model: concurrency limit, AIMD width of an endpoint, busy share, served rate.

The width rises by one while more concurrent batches cost no time, and falls by a quarter when they do: additive
increase, multiplicative decrease (Chiu and Jain 1989) on latency. A server with its own batching answers two batches as
fast as one until it is full; beyond that, batches only wait there, where their order cannot be changed any more. The
cost of a batch is its time per step of its longest answer, compared with the best of similar size and steps. Only a
width that is used is raised.
"""

import asyncio
from collections import deque


class ConcurrencyLimit(asyncio.Semaphore):
    """A semaphore with a variable size. Reduced, it withholds permits as they are released; running batches go on."""

    def __init__(self) -> None:
        super().__init__(1)
        self.width = 1
        self._owed = 0

    def resize(self, width: int) -> None:
        """Allow `width` holders at a time."""
        self._owed += self.width - width
        self.width = width
        while self._owed < 0:
            self._owed += 1
            super().release()

    def release(self) -> None:
        """Release one permit."""
        if self._owed > 0:
            self._owed -= 1
        else:
            super().release()


SLOW = 2.0
"""A batch is slow if it takes more than this many times the best of its kind."""
LESS = 0.75
_FORGETS = 1.01  # Per batch, so that a permanently slower server is not compared with its old best.


class AimdWidth:
    """`now` batches at a time, from 1 to `most`. Updated once a round, which has as many batches as may run at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._best: dict[tuple[int, int], float] = {}
        self._batches = self._slow = 0
        self._used = self._cut = False
        self.now = 1

    def ended(self, size: int, steps: int, ms: float, at_once: int) -> None:
        """A batch of `size` items with a longest answer of `steps` (0: unknown) took `ms`, with `at_once` running."""
        kind, cost = (size.bit_length(), steps.bit_length()), ms / max(1, steps)
        best = self._best[kind] = min(cost, self._best.get(kind, cost) * _FORGETS)
        self._batches += 1
        self._cut = False
        self._slow += cost > SLOW * best
        self._used = self._used or at_once >= self.now  # Of batches that end together the first sees all.
        if self._batches >= self.now:
            self._judge()

    def refused(self) -> None:
        """The server rejected a batch: halve the width, once for rejections in a row."""
        if not self._cut:
            self._begin(int(self.now / 2))
        self._cut = True

    def _judge(self) -> None:
        if 2 * self._slow > self._batches:
            self._begin(int(self.now * LESS))
        elif self._used and not self._slow:
            self._begin(self.now + 1)
        else:
            self._begin(self.now)

    def _begin(self, width: int) -> None:
        self.now = min(self._most, max(1, width))
        self._batches = self._slow = 0
        self._used = False


SPANNED_RUNS = 3
"""A served rate spans at least this many runs for each concurrent batch."""


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

    def ended(self, now: float, size: int, at_once: int = 1) -> None:
        """A batch of `size` ended at `now` (s), with up to `at_once` running."""
        self._ended.append((now, size))
        while len(self._ended) > SPANNED_RUNS * at_once + 1 and self._ended[1][0] < now - self._window_s:
            self._ended.popleft()

    @property
    def rps(self) -> float:
        """From the end of the first kept run to that of the last; 0 while only one is known."""
        if len(self._ended) < 2:
            return 0.0
        span_s = self._ended[-1][0] - self._ended[0][0]
        served = sum(size for _, size in self._ended) - self._ended[0][1]
        return served / span_s if span_s > 0 else 0.0
