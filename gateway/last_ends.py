"""What ended here in the last seconds, as the audit's pairs of records: the second witness, should Redis lose them.

A pair is built once for each accepted request, without its body and output, in about a microsecond. The ring is bounded
in number; its owner forgets what is old while Redis is well, so that nothing ages while Redis is away.
"""

import time
from asyncio import Future
from collections import deque
from collections.abc import Callable, Iterable

from gateway.audit_pairs import Pair, audit_pair
from gateway.inference.pending import Ending, Outcome, Waiter

KEEP_S = 10.0  # A failover may lose the writes of so long.
MAX_PAIRS = 50_000  # About 35 MB, and ten seconds of all that one gateway can do.


class LastEnds:
    """The ring. `clock` is monotonic seconds."""

    def __init__(
        self, gateway_id: str, clock: Callable[[], float] = time.monotonic, max_pairs: int = MAX_PAIRS
    ) -> None:
        self._gateway_id = gateway_id
        self._clock = clock
        self.max_pairs = max_pairs
        self._ring: deque[tuple[float, Pair]] = deque(maxlen=max_pairs)
        self.overwritten = 0  # Pairs that were still wanted, dropped because there were too many.

    def __len__(self) -> int:
        return len(self._ring)

    def note(self, waiter: Waiter) -> Pair:
        """Keep how this accepted request ended."""
        pair = audit_pair(self._gateway_id, waiter, outcome_of(waiter.future), self._clock(), "queue")
        self.keep([pair])
        return pair

    def keep(self, pairs: Iterable[Pair]) -> None:
        """Keep pairs that Redis was told of just now."""
        now = self._clock()
        for pair in pairs:
            if len(self._ring) == self.max_pairs and now - self._ring[0][0] <= KEEP_S:
                self.overwritten += 1
            self._ring.append((now, pair))

    def forget_old(self) -> None:
        """Drop what is older than ten seconds; to be called while Redis is known to have it."""
        before = self._clock() - KEEP_S
        while self._ring and self._ring[0][0] < before:
            self._ring.popleft()

    def pairs(self) -> list[Pair]:
        """All that is kept, oldest first."""
        return [pair for _, pair in self._ring]


def outcome_of(future: "Future[Outcome] | Ending") -> Outcome | None:
    """How waiting ended; None where nobody was told, because the client left."""
    return future.result() if future.done() and not future.cancelled() else None
