"""How many batches an endpoint is given at a time: one more while that costs no time, a quarter less when it does. Pure.

Additive increase, multiplicative decrease (Chiu and Jain 1989) on latency. A server that batches by itself answers two as
fast as one, until it is full; from then on more of them only wait there, where no order can be changed any more. What a
batch costs is its time for each step of its longest answer, compared with the best of its like: of about as many items and
steps. Only a limit that is used is raised, since one that is not says nothing.
"""

SLOW = 2.0
"""So many times the best of its like, and a batch was slow."""
LESS = 0.75
_FORGETS = 1.01  # With each batch: a server that became slower for good is not held to its youth.


class Width:
    """`now` batches at a time, from 1 to `most`. Judged once a round, of as many batches as may run at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._best: dict[tuple[int, int], float] = {}
        self._batches = self._slow = 0
        self._used = self._cut = False
        self.now = 1

    def ended(self, size: int, steps: int, ms: float, at_once: int) -> None:
        """A batch of so many items, whose longest answer took so many steps (0: unknown), while `at_once` ran."""
        kind, cost = (size.bit_length(), steps.bit_length()), ms / max(1, steps)
        best = self._best[kind] = min(cost, self._best.get(kind, cost) * _FORGETS)
        self._batches += 1
        self._cut = False
        self._slow += cost > SLOW * best
        self._used = self._used or at_once >= self.now  # Of those that end together only the first sees all.
        if self._batches >= self.now:
            self._judge()

    def refused(self) -> None:
        """The server turned a batch away, which halves. Those that it turns away with it are the same news."""
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
