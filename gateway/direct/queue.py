"""The queue of direct mode and the open direct requests, by id and by customer. No I/O.

The queue is bounded, strictly in the order of the tiers, and served in small batches. When it is full, a request
displaces the newest of the lowest tier, if that tier is below its own. How many a customer has is how many are open
here: there is no counter to go wrong.
"""

from asyncio import Future
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from gateway.inference.pending import PendingRequest

MAX_WAITING = 1024
MAX_BATCH = 8
"""Small, so that an enterprise request never stands behind a long run."""


class DirectEntry:
    """One request that goes past Redis. Times are monotonic seconds."""

    __slots__ = ("attempts", "begun", "entered_at", "pending", "priority", "started_at")

    def __init__(self, pending: PendingRequest, priority: int, entered_at: float) -> None:
        self.pending = pending
        self.priority = priority  # Of its tier: 1 first.
        self.entered_at = entered_at
        self.started_at: float | None = None  # When the worker that has it now was given it.
        self.attempts = 0  # Calls that were lost with it.
        self.begun: Future[bool] | None = None  # Whether the disk has its beginning; asked once, before it first runs.

    @property
    def id(self) -> str:
        return self.pending.id

    @property
    def on_record(self) -> bool:
        """Whether the disk has its beginning, or will soon: then an end belongs to it, whatever becomes of it."""
        return self.begun is not None and not (self.begun.done() and not self.begun.result())

    def waited_ms(self, now: float) -> float:
        """How long it has been here."""
        return (now - self.entered_at) * 1000


class DirectQueue:
    """The requests that wait for a worker."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._lines: dict[int, deque[DirectEntry]] = {}
        self._waiting = 0
        self._suspects_turn = False

    def __len__(self) -> int:
        return self._waiting

    def ahead_of(self, priority: int) -> int:
        """How many stand before a newcomer of this priority."""
        return sum(len(line) for other, line in self._lines.items() if other <= priority)

    def has_room(self, priority: int) -> bool:
        """Whether a newcomer of this priority may wait, be it in the place of somebody below it."""
        if self._waiting < self._max_waiting:
            return True
        return any(line for other, line in self._lines.items() if other > priority)

    def put(self, entry: DirectEntry) -> DirectEntry | None:
        """Let it wait; returns who has to go instead, which is the newcomer itself where nobody is below its tier."""
        shed: DirectEntry | None = None
        if self._waiting >= self._max_waiting:
            lowest = max((priority for priority, line in self._lines.items() if line), default=entry.priority)
            if lowest <= entry.priority:
                return entry
            shed = self._lines[lowest].pop()
            self._waiting -= 1
        self._line(entry).append(entry)
        self._waiting += 1
        return shed

    def put_back(self, entries: Iterable[DirectEntry]) -> None:
        """Let those that a worker did not serve wait at the head again, in the order given; they are never refused."""
        for entry in reversed(list(entries)):
            self._line(entry).appendleft(entry)
            self._waiting += 1

    def pick(self, most: int = MAX_BATCH) -> list[DirectEntry]:
        """Take out the next batch. What a worker was lost with goes alone, so that one bad input costs nobody else.

        Alone it would never find its turn below a tier that always has somebody, so it has every other one.
        """
        lines = [self._lines[priority] for priority in sorted(self._lines) if self._lines[priority]]
        suspect = next((line for line in lines if line[0].attempts), None)
        if suspect is not None and (suspect is lines[0] or self._suspects_turn):
            self._suspects_turn = False
            return self._taken([suspect.popleft()])
        self._suspects_turn = True
        batch: list[DirectEntry] = []
        for line in lines:
            held: list[DirectEntry] = []
            while line and len(batch) < min(most, MAX_BATCH):
                entry = line.popleft()
                (held if entry.attempts else batch).append(entry)
            line.extendleft(reversed(held))
        return self._taken(batch)

    def take_out(self, unwanted: Callable[[DirectEntry], bool]) -> list[DirectEntry]:
        """Take out everyone of whom `unwanted` is true."""
        found: list[DirectEntry] = []
        for priority, line in self._lines.items():
            staying: deque[DirectEntry] = deque()
            for entry in line:
                (found if unwanted(entry) else staying).append(entry)
            self._lines[priority] = staying
        return self._taken(found)

    def _taken(self, entries: list[DirectEntry]) -> list[DirectEntry]:
        self._waiting -= len(entries)
        return entries

    def _line(self, entry: DirectEntry) -> deque[DirectEntry]:
        return self._lines.setdefault(entry.priority, deque())


class OpenRequests:
    """Put in once, taken out once, whatever its end was."""

    def __init__(self) -> None:
        self._entries: dict[str, DirectEntry] = {}
        self._of: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[DirectEntry]:
        """Over those that are here now, whichever leave meanwhile."""
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> DirectEntry | None:
        """The one with this id."""
        return self._entries.get(request_id)

    def of_customer(self, customer_id: str) -> int:
        """How many one customer has here."""
        return len(self._of.get(customer_id, ()))

    def put(self, entry: DirectEntry) -> None:
        """It is under way."""
        self._entries[entry.id] = entry
        self._of.setdefault(entry.pending.submission.customer_id, set()).add(entry.id)

    def take(self, request_id: str) -> None:
        """It is not under way any more; nothing happens where it was not."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        customer_id = entry.pending.submission.customer_id
        self._of[customer_id].discard(request_id)
        if not self._of[customer_id]:
            del self._of[customer_id]
