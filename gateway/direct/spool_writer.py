"""Writes the audit spool in groups.

All entries added while a group is written form the next group. The callback of an entry is called when it is on disk or
could not be written; only then the worker is called, or the client gets its response. The accepted record of a request
reserves space for its ended record.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from gateway.direct.spool import Spool, SpoolError, SpoolFull
from gateway.inference.audit_pairs import SpoolEntry
from scheduler.failpoints import failpoint
from scheduler.fault_log import LoggedFaults, log_fault

MAX_GROUP = 256
PAIR_BYTES = 2048
"""Reserved bytes for each ended record; a pair with names of usual length needs a third of it."""
RETRY_S = 1.0
"""After a failed write, requests are rejected; one group per interval tries again."""


class Added(NamedTuple):
    """An entry, and a callback that receives whether it was stored."""

    entry: SpoolEntry
    callback: Callable[[bool], None]


class SpoolWriter:
    """Appends to the spool. `thread`: an executor with one thread, for all access to the files."""

    def __init__(self, spool: Spool, thread: ThreadPoolExecutor, clock: Callable[[], float] = time.monotonic) -> None:
        self._spool = spool
        self._thread = thread
        self._clock = clock
        self._waiting: list[Added] = []
        self._writing: list[Added] = []
        self._reserved: set[str] = set()  # Requests with an accepted record on disk and no ended record yet.
        self._wake = asyncio.Event()
        self._retry_at = 0.0
        self.problem: str | None = None
        self.groups = 0
        self.rejected = 0  # Entries that could not be written.

    @property
    def rejecting(self) -> bool:
        """Whether an entry that is added now would probably not be written."""
        return self._spool.full or self.failed_recently

    @property
    def failed_recently(self) -> bool:
        """Whether a write failed within the last RETRY_S."""
        return self.problem is not None and self._clock() < self._retry_at

    def add(self, entry: SpoolEntry, callback: Callable[[bool], None]) -> None:
        """Queue an entry. `callback` receives whether it was stored."""
        self._waiting.append(Added(entry, callback))
        self._wake.set()

    def release(self, request_id: str) -> None:
        """Release the space reserved for a request, whose ended record will not be written here."""
        self._reserved.discard(request_id)
        self._spool.reserved = PAIR_BYTES * len(self._reserved)

    async def run(self) -> None:
        """Write whenever entries were added; never returns."""
        while True:
            try:
                # After a problem no requests may arrive for hours, so the loop itself tests whether it persists.
                async with asyncio.timeout(None if self.problem is None else RETRY_S):
                    await self._wake.wait()
            except TimeoutError:
                try:
                    await asyncio.get_running_loop().run_in_executor(self._thread, self._spool.test_write)
                    self.problem = None
                except SpoolError as error:
                    self.problem = str(error)
                continue
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write all added entries. A group whose flush was cancelled is written again, which is harmless."""
        while self._writing or self._waiting:
            if not self._writing:
                self._writing, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
            stored = await self._write([added.entry for added in self._writing])
            if any(added.entry[1] for added in self._writing):
                failpoint("spool_unanswered")
            group, self._writing = self._writing, []
            for added, is_stored in zip(group, stored, strict=True):
                with LoggedFaults("spool callback failed"):  # An error in one callback must not affect the others.
                    added.callback(is_stored)

    async def _write(self, entries: Sequence[SpoolEntry]) -> list[bool]:
        """Write entries. Returns for each whether it was stored. If not all fit, those with reserved space are written."""
        try:
            if await self._append(entries):
                return [True] * len(entries)
        except SpoolFull as error:
            reserved = [entry for entry in entries if entry[1] and entry[0].id in self._reserved]
            ended = False
            if reserved:
                # They fit, unless the size limit is smaller than that of the previous process, or names are unusually long.
                with suppress(SpoolFull):
                    ended = await self._append(reserved)
            self._rejected(str(error), len(entries) - len(reserved) * ended)
            written = {id(entry) for entry in reserved if ended}
            return [id(entry) in written for entry in entries]
        self._rejected(self.problem or "", len(entries))
        return [False] * len(entries)

    async def _append(self, entries: Sequence[SpoolEntry]) -> bool:
        """Returns whether all entries are on disk; else sets `problem`. Raises SpoolFull if they do not fit."""
        self.groups += 1
        reserve = PAIR_BYTES * len(self._reserved_after(entries))
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._spool.append, entries, reserve)
        except SpoolFull:
            raise
        except SpoolError as error:
            self.problem = str(error)
            return False
        except Exception as error:  # noqa: BLE001  # no fault may end this loop
            log_fault("writing the spool failed", error)
            self.problem = "The spool cannot be written."
            return False
        self._reserved = self._reserved_after(entries)  # Computed again: some may have been released meanwhile.
        self.problem = None
        return True

    def _reserved_after(self, entries: Sequence[SpoolEntry]) -> set[str]:
        reserved = set(self._reserved)
        for accepted, ended in entries:
            if ended is None:
                reserved.add(accepted.id)
            else:
                reserved.discard(accepted.id)
        return reserved

    def _rejected(self, problem: str, entries: int) -> None:
        self.problem = problem
        self.rejected += entries
        self._retry_at = self._clock() + RETRY_S
