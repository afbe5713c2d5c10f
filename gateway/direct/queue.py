"""The queue of direct mode and the open direct requests, by id and by customer. No I/O.

The queue is bounded, strictly ordered by tier, fair between the customers of a tier, and served in small batches. When it is
full, a request displaces the last one of the lowest tier, if that tier is below its own. The concurrency of a customer is the
number of its open requests.
"""

from asyncio import Future
from bisect import insort
from collections.abc import Callable, Iterable, Iterator

from gateway.inference.pending import PendingRequest

MAX_WAITING = 1024
MAX_BATCH = 8
"""Small, so that an enterprise request never waits for a long batch."""

MAX_BATCH_BYTES = 16 << 20
"""Of bodies, after which a batch gets no more: with one of the largest size more, it fits into a direct message."""


class DirectEntry:
    """One request in direct mode. Times are monotonic seconds."""

    __slots__ = ("attempts", "entered_at", "pending", "priority", "recorded", "started_at", "tag")

    def __init__(self, pending: PendingRequest, priority: int, entered_at: float) -> None:
        self.pending = pending
        self.priority = priority  # Of its tier: 1 first.
        self.entered_at = entered_at
        self.started_at: float | None = None  # When it was sent to its current worker.
        self.tag = 0.0  # Its place in the order of its tier.
        self.attempts = 0  # Calls that were lost with it.
        self.recorded: Future[bool] | None = None  # Whether its accepted record is on disk; None before it is written.

    @property
    def id(self) -> str:
        return self.pending.id

    @property
    def is_recorded(self) -> bool:
        """Whether its accepted record is on disk, or being written: then its ended record must follow."""
        return self.recorded is not None and not (self.recorded.done() and not self.recorded.result())

    def waited_ms(self, now: float) -> float:
        """Milliseconds since it entered the queue."""
        return (now - self.entered_at) * 1000


class TierOrder:
    """The waiting requests of one tier, in the order of start-time fair queueing by requests and weight.

    As scheduler/lua/includes/backlogs.lua, which also counts GPU time: a customer that was idle starts at the virtual time.
    """

    def __init__(self) -> None:
        self.entries: list[DirectEntry] = []
        self._virtual_time = 0.0
        self._next_tags: dict[str, float] = {}

    def add(self, entry: DirectEntry) -> None:
        """Add a request in fair order."""
        submission = entry.pending.submission
        entry.tag = max(self._virtual_time, self._next_tags.get(submission.customer_id, 0.0))
        self._next_tags[submission.customer_id] = entry.tag + 1 / (submission.limits.weight or 1.0)
        insort(self.entries, entry, key=lambda other: other.tag)

    def next(self) -> DirectEntry:
        """Remove and return the first request."""
        entry = self.entries.pop(0)
        self._virtual_time = max(self._virtual_time, entry.tag)
        if not self.entries:
            self._next_tags.clear()
        return entry


class DirectQueue:
    """The requests that wait for a worker."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._queues: dict[int, TierOrder] = {}
        self._waiting = 0
        self._suspect_next = False

    def __len__(self) -> int:
        return self._waiting

    def ahead_of(self, priority: int) -> int:
        """Requests that are served before a new one of this priority."""
        return sum(len(queue.entries) for other, queue in self._queues.items() if other <= priority)

    def has_room(self, priority: int) -> bool:
        """Whether a new request of this priority can be queued, if necessary by displacing a lower tier's."""
        if self._waiting < self._max_waiting:
            return True
        return any(queue.entries for other, queue in self._queues.items() if other > priority)

    def put(self, entry: DirectEntry) -> DirectEntry | None:
        """Queue a request. Returns the displaced request, which is the new one if no tier below its own is queued."""
        shed: DirectEntry | None = None
        if self._waiting >= self._max_waiting:
            lowest = max(
                (priority for priority, queue in self._queues.items() if queue.entries), default=entry.priority
            )
            if lowest <= entry.priority:
                return entry
            shed = self._queues[lowest].entries.pop()
            self._waiting -= 1
        self._queue_of(entry).add(entry)
        self._waiting += 1
        return shed

    def put_back(self, entries: Iterable[DirectEntry]) -> None:
        """Return requests that a worker did not serve to the head of the queue, in this order; they are never rejected."""
        for entry in reversed(list(entries)):
            self._queue_of(entry).entries.insert(0, entry)
            self._waiting += 1

    def pick(self, most: int = MAX_BATCH) -> list[DirectEntry]:
        """Remove and return the next batch. A request whose call was lost runs alone, so that it does not affect others.

        Such a request gets every second batch, since it would never run below a tier that always has requests.
        """
        queues = [self._queues[priority] for priority in sorted(self._queues) if self._queues[priority].entries]
        suspect = next((queue for queue in queues if queue.entries[0].attempts), None)
        if suspect is not None and (suspect is queues[0] or self._suspect_next):
            self._suspect_next = False
            return self._taken([suspect.next()])
        self._suspect_next = True
        batch: list[DirectEntry] = []
        size = 0
        for queue in queues:
            suspects: list[DirectEntry] = []
            while queue.entries and len(batch) < min(most, MAX_BATCH) and size < MAX_BATCH_BYTES:
                entry = queue.next()
                size += len(entry.pending.submission.body)
                (suspects if entry.attempts else batch).append(entry)
            queue.entries[:0] = suspects
        return self._taken(batch)

    def remove_if(self, condition: Callable[[DirectEntry], bool]) -> list[DirectEntry]:
        """Remove and return all entries for which `condition` is true."""
        found: list[DirectEntry] = []
        for queue in self._queues.values():
            remaining: list[DirectEntry] = []
            for entry in queue.entries:
                (found if condition(entry) else remaining).append(entry)
            queue.entries = remaining
        return self._taken(found)

    def _taken(self, entries: list[DirectEntry]) -> list[DirectEntry]:
        self._waiting -= len(entries)
        return entries

    def _queue_of(self, entry: DirectEntry) -> TierOrder:
        return self._queues.setdefault(entry.priority, TierOrder())


class OpenRequests:
    """All open requests of direct mode. An entry is added once and removed once."""

    def __init__(self) -> None:
        self._entries: dict[str, DirectEntry] = {}
        self._by_customer: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[DirectEntry]:
        """Iterate over a copy, so that entries may be removed meanwhile."""
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> DirectEntry | None:
        """The entry with this id."""
        return self._entries.get(request_id)

    def of_customer(self, customer_id: str) -> int:
        """The number of open requests of a customer."""
        return len(self._by_customer.get(customer_id, ()))

    def add(self, entry: DirectEntry) -> None:
        """Add an entry."""
        self._entries[entry.id] = entry
        self._by_customer.setdefault(entry.pending.submission.customer_id, set()).add(entry.id)

    def remove(self, request_id: str) -> None:
        """Remove an entry, if it exists."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        customer_id = entry.pending.submission.customer_id
        self._by_customer[customer_id].discard(request_id)
        if not self._by_customer[customer_id]:
            del self._by_customer[customer_id]
