"""The audit records of recent requests, in a ring buffer of bounded length.

Old ones are dropped only while Redis is healthy, and once PostgreSQL has them: while it is not available, Redis may have the
only other copy.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable

from gateway.inference.audit_pairs import Pair, audit_pair
from gateway.inference.pending import PendingRequest

KEEP_S = 10.0  # A failover may lose the writes of this many seconds.
MAX_KEPT_PAIRS = 50_000  # About 35 MB; ten seconds of the highest throughput of one gateway.


class RecentOutcomes:
    """The ring buffer of audit records. `clock`: monotonic seconds."""

    def __init__(
        self, gateway_id: str, clock: Callable[[], float] = time.monotonic, max_pairs: int = MAX_KEPT_PAIRS
    ) -> None:
        self._gateway_id = gateway_id
        self._clock = clock
        self.max_pairs = max_pairs
        self._ring: deque[tuple[float, Pair]] = deque(maxlen=max_pairs)
        self.overwritten = 0  # Pairs dropped before KEEP_S because there were too many.
        self.unwritten_ms = math.inf  # UNIX time of the oldest audit record that PostgreSQL does not have.

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, pending: PendingRequest) -> Pair:
        """Build and keep the records of an accepted request that ended."""
        now = self._clock()
        pair = audit_pair(self._gateway_id, pending, pending.outcome, now, "queue")
        self._keep(now, pair)
        return pair

    def keep(self, pairs: Iterable[Pair]) -> None:
        """Keep pairs that were just sent to Redis."""
        now = self._clock()
        for pair in pairs:
            self._keep(now, pair)

    def _keep(self, now: float, pair: Pair) -> None:
        if len(self._ring) == self.max_pairs and now - self._ring[0][0] <= KEEP_S:
            self.overwritten += 1
        self._ring.append((now, pair))

    def forget_old(self) -> None:
        """Drop pairs older than KEEP_S that PostgreSQL has. To be called while Redis certainly has the others."""
        before, written_ms = self._clock() - KEEP_S, self.unwritten_ms - KEEP_S * 1000  # Clocks may differ by KEEP_S.
        while self._ring and self._ring[0][0] < before and self._ring[0][1][1].ended_at_ms < written_ms:
            self._ring.popleft()

    def pairs(self) -> list[Pair]:
        """All kept pairs, oldest first."""
        return [pair for _, pair in self._ring]
