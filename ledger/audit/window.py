"""Entries of the outbox that the auditor holds until the requests in them have ended.

Most requests end within some tenths of a second. The newest entries therefore contain requests without an end, and writing
those at once costs a second write each, which is three times as expensive as the first. Such a request is held for a
moment and written once. In a deep queue nearly no request ends within that moment, so there it is held for longer. One slow
request must not block the outbox of a fast system: the oldest request is held only while at least half of the requests that
began after it are open too. Entries stay in Redis until all of their records are written; here are only their hashes.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from ledger.audit.folding import Folded
from scheduler.protocol.audit_outbox import Taken, name_of
from scheduler.protocol.audit_records import AcceptedRecord, decode_entry

LONGEST_S = 60.0
"""A limit whatever the deadlines are: the next auditor has to read everything that is held again."""

RECORDS_PER_TURN = 1000
"""Other tasks run after this many records (a millisecond), since requests share the process."""


class HoldPolicy(msgspec.Struct, frozen=True):
    """When a request without an end is held, in seconds, requests and bytes.

    `hold_s` applies to every request, and `deep_s` while at least `deep_open` are open. Held requests are not in the audit
    and cannot be closed as abandoned. `most_open` and `most_bytes` limit what is held.
    """

    hold_s: float = 1.0
    deep_s: float = LONGEST_S
    deep_open: int = 1000
    most_open: int = 200_000
    most_bytes: int = 64 << 20

    def keeps(self, age_s: float, open_: int, begun: int, size: int) -> bool:
        """Whether the oldest open request is held further.

        `age_s`: since it was taken. `size`: bytes of its entry and all later ones, in which `begun` requests began, of which
        `open_` are open.
        """
        if open_ > self.most_open or size > self.most_bytes:
            return False
        deep = open_ >= self.deep_open and 2 * open_ >= begun
        return age_s < (self.deep_s if deep else self.hold_s)


class _Entry(NamedTuple):
    number: int
    name: str
    taken_at: float
    begun: int  # Requests that began in all earlier entries,
    size: int  # and the size of those.


class Written(NamedTuple):
    """What can be dropped: the number of oldest entries, the name of the first, and their bad records."""

    entries: int
    oldest: str
    bad: list[bytes]


class OutboxWindow:
    """Entries that were taken and not dropped, oldest first. `clock` is monotonic seconds."""

    def __init__(self, policy: HoldPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._entries: deque[_Entry] = deque()
        # Open requests in the order of their entries, and the number of the entry of each. Two dicts of strings and numbers,
        # since Python's garbage collector does not track those; with pairs it took a third of the time.
        self._open: dict[str, AcceptedRecord] = {}
        self._entry_of: dict[str, int] = {}
        self._bad: deque[tuple[int, bytes]] = deque()  # With the number of the entry that must be dropped first.
        self._next = self._begun = self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def held(self) -> tuple[int, str]:
        """How many entries the next take does not have to return, and the name of the newest of them."""
        return len(self._entries), self._entries[-1].name if self._entries else ""

    def forget(self) -> None:
        """Forget all entries, so that the next take returns them again: it is unknown which records were written."""
        self._entries.clear()
        self._open.clear()
        self._entry_of.clear()
        self._bad.clear()

    async def read(self, taken: Taken, *, hold: bool = True) -> Folded:
        """Add entries and return the records to write now. `hold`: whether open requests may be held."""
        folded = Folded()
        lost: dict[str, AcceptedRecord] = {}
        if taken.held != len(self._entries):  # Redis has lost entries. Their open requests may be known here only.
            lost = self._open.copy()
            self.forget()
        await self._fold(taken.entries, folded)
        for request_id in self._open.keys() & folded.ended.keys():  # Began in an earlier take.
            self._close(request_id, folded)
        for request_id in self._overdue() if hold else list(self._open):
            self._close(request_id, folded)
        for request_id, record in lost.items():
            folded.accepted.setdefault(request_id, record)
        return folded

    def set_aside(self, bad: Sequence[bytes]) -> None:
        """Keep records that PostgreSQL rejected until the entries that may contain them are dropped."""
        self._bad += [(self._next - 1, entry) for entry in bad]

    def written(self) -> Written:
        """The oldest entries whose records are all written."""
        if not self._entries:
            return Written(0, "", [])
        oldest = self._entries[0]
        first_kept = next(iter(self._entry_of.values()), self._next)
        bad = [bad for number, bad in self._bad if number < first_kept]
        return Written(first_kept - oldest.number, oldest.name, bad)

    def dropped(self, count: int) -> None:
        """Remove the `count` oldest entries."""
        for _ in range(count):
            number = self._entries.popleft().number
            while self._bad and self._bad[0][0] <= number:
                self._bad.popleft()

    async def _fold(self, new: Sequence[bytes], folded: Folded) -> None:
        """Decode new entries. Their requests that have not ended are moved from `folded.accepted` to the open ones."""
        now, turn = self._clock(), 0
        counts: list[int] = []  # For each new entry, how many requests began in the new entries up to and including it.
        for raw in new:
            records, bad = decode_entry(raw)
            self._bad += [(self._next, record) for record in bad]
            self._entries.append(_Entry(self._next, name_of(raw), now, self._begun + len(folded.accepted), self._size))
            self._next += 1
            self._size += len(raw)
            folded.add(records)
            counts.append(len(folded.accepted))
            turn += len(records)
            if turn >= RECORDS_PER_TURN:
                turn = 0
                await asyncio.sleep(0)
        self._begun += len(folded.accepted)
        arrived, folded.accepted = iter(folded.accepted.items()), {}
        number, before = self._next - len(counts), 0
        for count in counts:
            for request_id, record in islice(arrived, count - before):
                if request_id in folded.ended:
                    folded.accepted[request_id] = record
                elif request_id not in self._open:
                    self._open[request_id] = record
                    self._entry_of[request_id] = number
            number, before = number + 1, count

    def _overdue(self) -> list[str]:
        """The open requests that are not held any longer, oldest first."""
        now, entries, found = self._clock(), iter(self._entries), list[str]()
        entry = next(entries, None)
        for request_id, number in self._entry_of.items():
            while entry and entry.number < number:
                entry = next(entries, None)
            if not entry or self._policy.keeps(
                now - entry.taken_at,
                len(self._open) - len(found),
                self._begun - entry.begun,
                self._size - entry.size,
            ):
                break
            found.append(request_id)
        return found

    def _close(self, request_id: str, folded: Folded) -> None:
        """Return an open request with the records to write. Of two accepted records the first is used."""
        del self._entry_of[request_id]
        folded.accepted[request_id] = self._open.pop(request_id)
