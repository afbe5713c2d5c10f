"""Outbox entries in the auditor's hands: which are new, which requests still miss their end, and what may be dropped.

A request lives for some tenths of a second, so the newest entries always hold beginnings whose ends are not there yet.
Written at once, each of them would cost a second write; held back for a moment, it is one row, written once. Entries
stay taken, and so in Redis, until all that they hold is written.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from ledger.audit_rows import Folded
from scheduler.audit import Accepted, decode_entry

RECORDS_A_TURN = 1000
"""After so many records, a millisecond, other tasks get a turn: they share the process, and requests wait for them."""


class _Entry(NamedTuple):
    number: int
    raw: bytes
    taken_at: float


class Window:
    """Entries that were taken and not dropped, oldest first. `clock`: monotonic seconds."""

    def __init__(self, hold_s: float, clock: Callable[[], float]) -> None:
        """`hold_s`: how long a request that has only begun waits for its end."""
        self._hold_s = hold_s
        self._clock = clock
        self._entries: deque[_Entry] = deque()
        # Requests that have only begun, in the order of entries, and the entry of each. Two dicts and no pairs, for
        # texts and numbers are nothing to Python's garbage collector, which was a third of all this.
        self._open: dict[str, Accepted] = {}
        self._entry_of: dict[str, int] = {}
        self._bad: deque[tuple[int, bytes]] = deque()  # With the number of the entry that has to go first.
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def forget(self) -> None:
        """Whatever is held comes with the next take as if it were new: nobody knows what of it was written."""
        self._entries.clear()
        self._open.clear()
        self._entry_of.clear()
        self._bad.clear()

    async def read(self, taken: Sequence[bytes], *, hold: bool = True) -> Folded:
        """What is to be written now that these are taken, the oldest of which are those that are held already.

        `hold`: whether requests that have only begun may still wait for their ends.
        """
        folded = Folded()
        stray = self._lost(taken)
        await self._fold(taken[len(self._entries) :], folded)
        self._complete(folded)
        self._release(folded, self._clock() - self._hold_s if hold else None)
        for request_id, record in stray.items():
            folded.accepted.setdefault(request_id, record)
        return folded

    def set_aside(self, bad: Sequence[bytes]) -> None:
        """Keep what can never be written, until the entries that it may have come in are dropped."""
        self._bad += [(self._next - 1, entry) for entry in bad]

    def written(self) -> tuple[int, list[bytes]]:
        """How many of the oldest entries may be dropped, all that was read of them being written; what is bad of it."""
        if not self._entries:
            return 0, []
        first_kept = next(iter(self._entry_of.values()), self._next)
        return first_kept - self._entries[0].number, [bad for number, bad in self._bad if number < first_kept]

    def dropped(self, count: int) -> None:
        """So many of the oldest entries are gone."""
        for _ in range(count):
            number = self._entries.popleft().number
            while self._bad and self._bad[0][0] <= number:
                self._bad.popleft()

    def _lost(self, taken: Sequence[bytes]) -> dict[str, Accepted]:
        """What had begun in entries that are held and were not taken again: Redis lost them, and nobody else has them."""
        if [entry.raw for entry in self._entries] == list(taken[: len(self._entries)]):
            return {}
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
            self._entries.append(_Entry(self._next, raw, now))
            self._next += 1
            folded.add(records)
            counts.append(len(folded.accepted))
            turn += len(records)
            if turn >= RECORDS_A_TURN:
                turn = 0
                await asyncio.sleep(0)
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

    def _release(self, folded: Folded, taken_until: float | None) -> None:
        """Give up waiting for the ends of what was taken so long ago; None: of everything."""
        late = [entry for entry in self._entries if taken_until is None or entry.taken_at <= taken_until]
        if late:
            last = late[-1].number
            for request_id in [i for i, number in self._entry_of.items() if number <= last]:
                self._close(request_id, folded)

    def _close(self, request_id: str, folded: Folded) -> None:
        del self._entry_of[request_id]
        folded.accepted[request_id] = self._open.pop(request_id)
