"""Outbox entries held by the auditor: which are new, which still miss an end, how long they wait, what may be dropped.

A request lives for some tenths of a second, so the newest entries always hold beginnings without ends. Written at once,
each of them would cost a second write, which costs three times the first; held back for a moment, it is one row,
written once. In a deep queue nearly none ends within that moment, so there it waits on. Entries stay in Redis until all
that they hold is written; only their hashes are kept here. One slow request must not keep the outbox of a fast system,
so the oldest of what is held goes on waiting only while at least half of what has begun since is open too. The policy
is pure arithmetic.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from ledger.audit.rows import Folded
from scheduler.protocol.audit_outbox import AcceptedRecord, Taken, decode_entry, name_of

LONGEST_S = 60.0
"""However long requests may live: an auditor that takes over reads again all that was held."""


class HoldPolicy(msgspec.Struct, frozen=True):
    """How long and how much, in seconds, requests and bytes.

    `hold_s`: every beginning may wait so long. `deep_s`: so long where at least `deep_open` are open; until then the
    audit does not know of them, nor can they be closed as abandoned. `most_open`, `most_bytes`: no more is ever held.
    """

    hold_s: float = 1.0
    deep_s: float = LONGEST_S
    deep_open: int = 1000
    most_open: int = 200_000
    most_bytes: int = 64 << 20

    def keeps(self, age_s: float, open_: int, begun: int, size: int) -> bool:
        """Whether the oldest open request may go on waiting.

        `age_s`: since it was taken. Of its entry and all that came after: `open_` requests without an end, of the
        `begun` ones, in `size` bytes.
        """
        if open_ > self.most_open or size > self.most_bytes:
            return False
        deep = open_ >= self.deep_open and 2 * open_ >= begun
        return age_s < (self.deep_s if deep else self.hold_s)


RECORDS_A_TURN = 1000
"""After so many records, a millisecond, other tasks get a turn: they share the process, and requests wait for them."""


class _Entry(NamedTuple):
    number: int
    name: str
    taken_at: float
    begun: int  # Requests that began in all entries before it,
    size: int  # and the bytes of those.


class Written(NamedTuple):
    """What may be dropped: so many of the oldest entries, the name of the first, and what is bad of them."""

    entries: int
    oldest: str
    bad: list[bytes]


class OutboxWindow:
    """Entries that were taken and not dropped, oldest first. `clock`: monotonic seconds."""

    def __init__(self, policy: HoldPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._entries: deque[_Entry] = deque()
        # Requests that have only begun, in the order of entries, and the entry of each. Two dicts and no pairs, for
        # texts and numbers are nothing to Python's garbage collector, which was a third of all this.
        self._open: dict[str, AcceptedRecord] = {}
        self._entry_of: dict[str, int] = {}
        self._bad: deque[tuple[int, bytes]] = deque()  # With the number of the entry that has to go first.
        self._next = self._begun = self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def held(self) -> tuple[int, str]:
        """How many entries the next take need not return, and the name of the newest of them."""
        return len(self._entries), self._entries[-1].name if self._entries else ""

    def forget(self) -> None:
        """Whatever is held comes with the next take as if it were new: nobody knows what of it was written."""
        self._entries.clear()
        self._open.clear()
        self._entry_of.clear()
        self._bad.clear()

    async def read(self, taken: Taken, *, hold: bool = True) -> Folded:
        """What is to be written now that these are taken.

        `hold`: whether requests that have only begun may still wait for their ends.
        """
        folded = Folded()
        lost = {} if taken.held == len(self._entries) else self._lost()
        await self._fold(taken.entries, folded)
        self._complete(folded)
        for request_id in self._overdue() if hold else list(self._open):
            self._close(request_id, folded)
        for request_id, record in lost.items():
            folded.accepted.setdefault(request_id, record)
        return folded

    def set_aside(self, bad: Sequence[bytes]) -> None:
        """Keep what can never be written, until the entries that it may have come in are dropped."""
        self._bad += [(self._next - 1, entry) for entry in bad]

    def written(self) -> Written:
        """What may be dropped: all that was read of it is written."""
        if not self._entries:
            return Written(0, "", [])
        oldest = self._entries[0]
        first_kept = next(iter(self._entry_of.values()), self._next)
        bad = [bad for number, bad in self._bad if number < first_kept]
        return Written(first_kept - oldest.number, oldest.name, bad)

    def dropped(self, count: int) -> None:
        """So many of the oldest entries are gone."""
        for _ in range(count):
            number = self._entries.popleft().number
            while self._bad and self._bad[0][0] <= number:
                self._bad.popleft()

    def _lost(self) -> dict[str, AcceptedRecord]:
        """What had begun in entries that Redis does not have any more: nobody else may know of it."""
        lost = self._open.copy()
        self.forget()
        return lost

    async def _fold(self, new: Sequence[bytes], folded: Folded) -> None:
        """Read new entries; `folded.accepted` keeps what has ended in them, the rest is open."""
        now, turn = self._clock(), 0
        counts: list[int] = []
        for raw in new:
            records, bad = decode_entry(raw)
            self._bad += [(self._next, record) for record in bad]
            self._entries.append(_Entry(self._next, name_of(raw), now, self._begun + len(folded.accepted), self._size))
            self._next += 1
            self._size += len(raw)
            folded.add(records)
            counts.append(len(folded.accepted))
            turn += len(records)
            if turn >= RECORDS_A_TURN:
                turn = 0
                await asyncio.sleep(0)
        self._begun += len(folded.accepted)
        self._keep_open(folded, counts)

    def _keep_open(self, folded: Folded, counts: Sequence[int]) -> None:
        """Take out of `folded` what has no end yet. `counts`: how many had begun in each new entry and before it."""
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

    def _complete(self, folded: Folded) -> None:
        """What had begun in earlier takes and has ended now. Of two beginnings the first stands."""
        for request_id in self._open.keys() & folded.ended.keys():
            self._close(request_id, folded)

    def _overdue(self) -> list[str]:
        """Who has waited long enough, oldest first."""
        now, entries, found = self._clock(), iter(self._entries), list[str]()
        entry = next(entries, None)
        for request_id, number in self._entry_of.items():
            while entry and entry.number < number:
                entry = next(entries, None)
            if not entry or self._may_wait(entry, now, len(self._open) - len(found)):
                break
            found.append(request_id)
        return found

    def _may_wait(self, entry: _Entry, now: float, open_: int) -> bool:
        return self._policy.keeps(now - entry.taken_at, open_, self._begun - entry.begun, self._size - entry.size)

    def _close(self, request_id: str, folded: Folded) -> None:
        del self._entry_of[request_id]
        folded.accepted[request_id] = self._open.pop(request_id)
