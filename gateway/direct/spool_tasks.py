"""Group commit into the spool: whatever was added while the last group was on its way to the disk goes together.

Who adds a note is called back when the disk has it, or does not take it; only then is a worker called with what began,
and the client answered for what ended. The room for an end is promised with its beginning: what ran can be noted,
however full it is by then.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from gateway.audit_pairs import Note
from gateway.direct.spool import Spool, SpoolError, SpoolFull
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault

MAX_GROUP = 256
PAIR_ROOM = 2048
"""Bytes promised to each end; a pair with names of ordinary length takes a third of it."""
RETRY_S = 1.0
"""After the disk refused, requests are refused at the door; once in so long one group tries again."""


class Added(NamedTuple):
    """One note, and who is told whether it is safe."""

    note: Note
    then: Callable[[bool], None]


class SpoolWriter:
    """The only one who appends. `thread` has one worker, and runs whatever touches the files."""

    def __init__(self, spool: Spool, thread: ThreadPoolExecutor, clock: Callable[[], float] = time.monotonic) -> None:
        self._spool = spool
        self._thread = thread
        self._clock = clock
        self._waiting: list[Added] = []
        self._writing: list[Added] = []
        self._promised: set[str] = set()  # Whose beginning the disk has, and whose end is still to come.
        self._wake = asyncio.Event()
        self._retry_at = 0.0
        self.problem: str | None = None
        self.groups = 0
        self.refused = 0  # Notes that the disk did not take.

    @property
    def refusing(self) -> bool:
        """Whether what is added now would be refused in all likelihood."""
        return self._spool.full or self.resting

    @property
    def resting(self) -> bool:
        """Whether the disk refused a moment ago."""
        return self.problem is not None and self._clock() < self._retry_at

    def add(self, note: Note, then: Callable[[bool], None]) -> None:
        """Write this note soon, and call `then` with whether it is safe."""
        self._waiting.append(Added(note, then))
        self._wake.set()

    def release(self, request_id: str) -> None:
        """Its end will not be written here."""
        self._promised.discard(request_id)
        self._spool.kept_free = PAIR_ROOM * len(self._promised)

    async def run(self) -> None:
        """Write whenever something was added; never ends by itself."""
        while True:
            try:
                # Nobody may write for hours after a problem: whether it is over has to be tried.
                async with asyncio.timeout(None if self.problem is None else RETRY_S):
                    await self._wake.wait()
            except TimeoutError:
                await self._try_out()
                continue
            self._wake.clear()
            await self.flush()

    async def _try_out(self) -> None:
        problem = None
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._spool.try_out)
        except SpoolError as error:
            problem = str(error)
        self.problem = problem

    async def flush(self) -> None:
        """Write everything that was added. What a cancelled flush left is written again, which does no harm."""
        while self._writing or self._waiting:
            if not self._writing:
                self._writing, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
            safe = await self._safe([added.note for added in self._writing])
            if any(added.note[1] for added in self._writing):
                failpoint("spool_unanswered")
            group, self._writing = self._writing, []
            for added, is_safe in zip(group, safe, strict=True):
                _tell(added.then, safe=is_safe)

    async def _safe(self, notes: Sequence[Note]) -> list[bool]:
        """Write them; for each whether the disk has it. Where not all have room, those who were promised it have."""
        try:
            if await self._append(notes):
                return [True] * len(notes)
        except SpoolFull as error:
            promised = [note for note in notes if note[1] and note[0].id in self._promised]
            ended = bool(promised) and await self._append_promised(promised)
            self._refused(str(error), len(notes) - len(promised) * ended)
            written = {id(note) for note in promised if ended}
            return [id(note) in written for note in notes]
        self._refused(self.problem or "", len(notes))
        return [False] * len(notes)

    async def _append_promised(self, notes: Sequence[Note]) -> bool:
        try:
            return await self._append(notes)
        except SpoolFull:  # A smaller limit than the process before us had, or names longer than anybody has.
            return False

    async def _append(self, notes: Sequence[Note]) -> bool:
        """Whether the disk has them all; else `problem` says why. Raises SpoolFull where there is no room for them."""
        self.groups += 1
        keep_free = PAIR_ROOM * len(self._promised_after(notes))
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._spool.append, notes, keep_free)
        except SpoolFull:
            raise
        except SpoolError as error:
            self.problem = str(error)
            return False
        except Exception as error:  # noqa: BLE001  # no fault may end this loop
            log_fault("writing the spool failed", error)
            self.problem = "The spool cannot be written."
            return False
        self._promised = self._promised_after(notes)  # Some may have been released meanwhile.
        self.problem = None
        return True

    def _promised_after(self, notes: Sequence[Note]) -> set[str]:
        promised = set(self._promised)
        for accepted, ended in notes:
            if ended is None:
                promised.add(accepted.id)
            else:
                promised.discard(accepted.id)
        return promised

    def _refused(self, problem: str, notes: int) -> None:
        self.problem = problem
        self.refused += notes
        self._retry_at = self._clock() + RETRY_S


def _tell(then: Callable[[bool], None], *, safe: bool) -> None:
    try:
        then(safe)
    except Exception as error:  # noqa: BLE001  # one callback's fault must not cost the others their answers
        log_fault("answering after the spool failed", error)
