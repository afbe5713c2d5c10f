"""Writing the audit spool in groups, and merging it into Redis.

Whatever was added while the last group was written goes to the disk together. The caller is called back when the disk
has the note, or refuses it; only then is a worker called, or the client answered. Room for the end of a request is
reserved with its beginning.

The merge starts as soon as Redis responds and pauses between calls. Every note is adopted there, then its file is
removed; adopting one twice changes nothing. Files of gateways that are gone are taken over, at start and now and then.
A beginning without an end in its file is sent alone: the end comes with a later file, or the auditor closes the row.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple

import structlog

from gateway.direct.spool import FOLDER, Spool, SpoolError, SpoolFull
from gateway.inference.recovery import Note, Pair
from scheduler.errors import TierlaneError
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import Adoption
from scheduler.tasks import Loop

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


log = structlog.get_logger("gateway")

CALL_SIZE = 256
EVERY_S = 0.1
BREATH_S = 0.005
DEAD_EVERY_S = 10.0
LAST_S = 1.0

T = TypeVar("T")
Given = TypeVarTuple("Given")


class SpoolMerge:
    """Merges while `may` says that Redis answers. `clock` is monotonic seconds.

    `remember` is given what Redis has been told, since it may die before the auditor has taken it.
    """

    def __init__(
        self,
        spool: Spool,
        thread: ThreadPoolExecutor,
        adoption: Adoption,
        *,
        may: Callable[[], bool],
        remember: Callable[[Sequence[Pair]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._thread = thread
        self._adoption = adoption
        self._may = may
        self._remember = remember
        self._clock = clock
        self._dead_at = 0.0  # When to look for files of the dead again.
        self._offsets: dict[Path, int] = {}  # How far files that could not be merged to their end have come.
        self.merged = 0

    async def run(self) -> None:
        """Merge whenever there is something and Redis answers; never ends by itself."""
        while True:
            await asyncio.sleep(EVERY_S)
            if not self._may():
                continue
            try:
                await self.merge()
            except TierlaneError:
                continue  # Redis is away again.
            except Exception as error:  # noqa: BLE001  # no fault may end this loop
                log_fault("merging the spool failed", error)
                await asyncio.sleep(RETRY_S)

    async def last(self) -> None:
        """Merge before the end, as far as that goes quickly; the next who has the directory does the rest."""
        try:
            async with asyncio.timeout(LAST_S):
                await self.merge()
        except (TierlaneError, OSError, TimeoutError) as error:
            log.warning("the spool is left for the next gateway", reason=str(error))

    async def merge(self) -> None:
        """Merge what there is now. Raises RedisUnavailable, and OSError where the files cannot be read."""
        if self._spool.bytes:
            await self._in_thread(self._spool.cut)
            for path in await self._in_thread(self._spool.to_merge):
                await self._merge_file(path)
        if self._clock() >= self._dead_at:
            for owner in await self._in_thread(self._spool.dead_owners):
                await self._merge_dead(owner)
            self._dead_at = self._clock() + DEAD_EVERY_S

    async def _merge_dead(self, owner: str) -> None:
        found = await self._in_thread(self._spool.take_over, owner)
        if found is None:
            return
        lock, paths = found
        try:
            for path in paths:
                await self._merge_file(path)
            log.info("merged the spool of a gateway that is gone", gateway=owner, files=len(paths))
        finally:
            await self._in_thread(self._spool.finish, owner, lock)

    async def _merge_file(self, path: Path) -> None:
        while True:
            offset = self._offsets.get(path, 0)
            part = await self._in_thread(self._spool.read, path, offset, CALL_SIZE)
            if part.notes:
                pairs = [(accepted, ended) for accepted, ended in part.notes if ended]
                await self._adoption.adopt([*_unended(part.notes, pairs), *pairs])
                self._remember(pairs)
                self.merged += len(part.notes)
            if part.bad:
                log.error("unreadable lines in the spool are set aside", file=path.name, lines=len(part.bad))
                await self._in_thread(self._spool.set_aside, path, part.bad)
            if part.next_offset == offset:
                break
            self._offsets[path] = part.next_offset
            await asyncio.sleep(BREATH_S)
        failpoint("spool_unremoved")
        await self._in_thread(self._spool.remove, path)
        self._offsets.pop(path, None)

    async def _in_thread(self, act: Callable[[*Given], T], *given: *Given) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, act, *given)


def _unended(notes: Sequence[Note], pairs: Sequence[Pair]) -> list[Note]:
    """The beginnings that no pair among them repeats."""
    repeated = {ended.id for _, ended in pairs}
    return [note for note in notes if note[0].id not in repeated]


class DirectAudit:
    """The audit of direct mode; without a `data_dir` it never begins.

    `may_merge` says whether Redis answers, `remember` is given what Redis has been told.
    """

    def __init__(
        self,
        data_dir: Path | None,
        gateway_id: str,
        max_bytes: int,
        adoption: Adoption,
        *,
        may_merge: Callable[[], bool],
        remember: Callable[[Sequence[Pair]], None],
    ) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._data_dir = data_dir
        self.spool = Spool((data_dir or Path()) / FOLDER, gateway_id, max_bytes)
        self.writer = SpoolWriter(self.spool, self._thread)
        self._merge = SpoolMerge(self.spool, self._thread, adoption, may=may_merge, remember=remember)
        self._may_merge = may_merge
        self._problem: str | None = None
        self.begun = False

    def begin(self) -> None:
        """Lock the files. Where that is not possible the gateway goes without direct mode, and health says why."""
        if self._data_dir is None:
            return
        try:
            self.spool.open()
        except SpoolError as error:
            self._problem = str(error)
            log.warning("no direct mode", reason=str(error))
        else:
            self.begun = True

    @property
    def takes(self) -> bool:
        """Whether what is answered now can be noted."""
        return self.begun and not self.writer.refusing

    @property
    def problem(self) -> str | None:
        """Why it cannot be noted, in a sentence, or None."""
        if self._problem is None and self.begun and self.spool.full:
            return f"The spool is full: {self.spool.bytes} bytes wait for Redis."
        return self._problem or self.writer.problem

    def loops(self) -> dict[str, Loop]:
        """What runs for as long as the gateway does."""
        return {"spool writer": self.writer.run, "spool merge": self._merge.run} if self.begun else {}

    def note(self, note: Note, then: Callable[[bool], None]) -> None:
        """Have this on the disk, then be told whether it is."""
        self.writer.add(note, then)

    def release(self, request_id: str) -> None:
        """Keep no room for its end any longer: it goes another way."""
        self.writer.release(request_id)

    async def close(self) -> None:
        """Write what is left, merge it where Redis answers, and let go of the files."""
        if self.begun:
            await self.writer.flush()
            if self._may_merge():
                await self._merge.last()
            self.spool.close()
        self._thread.shutdown(wait=False)
