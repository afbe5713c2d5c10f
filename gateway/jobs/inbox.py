"""Replies to jobs as they come in on the jobs' channel: the fast way only, since the stored replies are the truth.

So it is bounded, and may lose what it holds: whoever looks at the stored replies finds the rest.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from gateway.inference.pending import Waiter
from gateway.jobs_ends import end_of
from ledger.jobs import JobEnd
from scheduler.protocol.replies import Reply

MOST = 4096
MOST_BYTES = 16 << 20
KEEP_S = 5.0
"""A fast model answers before the job's row is committed: its reply is offered again for so long,"""

OFFER_EVERY_S = 0.25
"""so often."""


class _Kept:
    """One end, since when it is here, and when it is offered next; monotonic seconds."""

    __slots__ = ("end", "next_at", "since")

    def __init__(self, end: JobEnd, now: float) -> None:
        self.end = end
        self.since = self.next_at = now


class JobInbox:
    """What the subscriber hands over. `lost` is set where something may have been missed. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, _Kept] = {}
        self._bytes = 0
        self.arrived = asyncio.Event()
        self.lost = False

    def __len__(self) -> int:
        return len(self._ends)

    def started_before(self, _moment: float) -> Sequence[Waiter]:
        """Nobody waits here whose stored reply the subscriber would have to read."""
        return ()

    def resolve_all(self, replies: Iterable[Reply | None]) -> None:
        """Keep them until they are taken."""
        now = self._clock()
        for reply in replies:
            if reply is None or reply.id in self._ends:
                continue
            if len(self._ends) >= MOST or self._bytes + len(reply.output) > MOST_BYTES:
                self.lost = True
                continue
            self._ends[reply.id] = _Kept(end_of(reply), now)
            self._bytes += len(reply.output)
        self.arrived.set()

    def missed(self) -> None:
        """The subscription was made again: what was published meanwhile is not here."""
        self.lost = True
        self.arrived.set()

    def take(self) -> list[JobEnd]:
        """What is new, and once in a while the others; each stays until `written` or too old."""
        self.arrived.clear()
        now = self._clock()
        self._drop([job_id for job_id, kept in self._ends.items() if kept.since < now - KEEP_S])
        taken = [kept for kept in self._ends.values() if kept.next_at <= now]
        for kept in taken:
            kept.next_at = now + OFFER_EVERY_S
        return [kept.end for kept in taken]

    def written(self, ids: Iterable[str]) -> None:
        """These are stored."""
        self._drop(ids)

    def clear(self) -> None:
        """Forget everything."""
        self._ends, self._bytes, self.lost = {}, 0, False

    def _drop(self, ids: Iterable[str]) -> None:
        for job_id in ids:
            dropped = self._ends.pop(job_id, None)
            if dropped is not None:
                self._bytes -= len(dropped.end.output)
