"""Replies from the jobs' channel, until the reconciler has written them.

The inbox is bounded and may lose replies: the reconciler finds those in the stored replies.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from gateway.inference.pending import PendingRequest
from gateway.jobs.job_end import end_of
from ledger.jobs import JobEnd
from scheduler.protocol.replies import Reply

LINE_NONCE = "line"
"""The nonce of the lines of batches, whose replies the gateway that runs the batch reads (gateway/batch_api/)."""

MAX_ENDS = 4096
MAX_BYTES = 16 << 20
KEEP_S = 5.0
"""A fast model replies before the job's row is committed: its end is offered again for this time,"""

OFFER_EVERY_S = 0.25
"""at this interval."""


class _KeptEnd:
    """An end with the time of its arrival and of its next offer, in monotonic seconds."""

    __slots__ = ("end", "next_at", "since")

    def __init__(self, end: JobEnd, now: float) -> None:
        self.end = end
        self.since = self.next_at = now


class JobInbox:
    """Ends from the subscriber, until they are written. `lost` is set when some may be missing. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, _KeptEnd] = {}
        self._bytes = 0
        self.arrived = asyncio.Event()
        self.lost = False

    def __len__(self) -> int:
        return len(self._ends)

    def started_before(self, _moment: float) -> Sequence[PendingRequest]:
        """Empty: no request waits here for a stored reply."""
        return ()

    def resolve_all(self, replies: Iterable[Reply | None]) -> None:
        """Add the ends of replies."""
        now = self._clock()
        for reply in replies:
            if reply is None or reply.nonce == LINE_NONCE or reply.id in self._ends:
                continue
            if len(self._ends) >= MAX_ENDS or self._bytes + len(reply.output) > MAX_BYTES:
                self.lost = True
                continue
            self._ends[reply.id] = _KeptEnd(end_of(reply), now)
            self._bytes += len(reply.output)
        self.arrived.set()

    def missed(self) -> None:
        """The subscription was renewed: replies that were published in between are missing."""
        self.lost = True
        self.arrived.set()

    def take(self) -> list[JobEnd]:
        """New ends, and at intervals the others. Each is kept until it is `written` or too old."""
        self.arrived.clear()
        now = self._clock()
        self.written([job_id for job_id, kept in self._ends.items() if kept.since < now - KEEP_S])
        taken = [kept for kept in self._ends.values() if kept.next_at <= now]
        for kept in taken:
            kept.next_at = now + OFFER_EVERY_S
        return [kept.end for kept in taken]

    def written(self, ids: Iterable[str]) -> None:
        """Remove these ends."""
        for job_id in ids:
            kept = self._ends.pop(job_id, None)
            if kept is not None:
                self._bytes -= len(kept.end.output)

    def clear(self) -> None:
        self._ends, self._bytes, self.lost = {}, 0, False
