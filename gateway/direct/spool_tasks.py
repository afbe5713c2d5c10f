"""Writes the audit spool in groups, and merges it into Redis.

All entries added while a group is written form the next group. The callback of an entry is called when it is on disk or
could not be written; only then the worker is called, or the client gets its response. The accepted record of a request
reserves space for its ended record.

The merge starts as soon as Redis responds, and pauses between calls. It adopts the entries of a file into Redis, which is
idempotent, then removes the file. Files of stopped gateways are taken over at the start and every ten seconds. An accepted
record without an ended record in its file is sent alone: the ended record is in a later file, or the auditor closes the
row.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple

import structlog

from gateway.direct.spool import FOLDER, Spool, SpoolError, SpoolFull
from gateway.inference.recovery import Pair, SpoolEntry
from scheduler.errors import TierlaneError
from scheduler.failpoints import failpoint
from scheduler.fault_log import LoggedFaults, log_fault
from scheduler.protocol.adoption import Adoption
from scheduler.tasks import Loop, next_tick

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
                await self._test_write()
                continue
            self._wake.clear()
            await self.flush()

    async def _test_write(self) -> None:
        problem = None
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._spool.test_write)
        except SpoolError as error:
            problem = str(error)
        self.problem = problem

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
                _call(added.callback, stored=is_stored)

    async def _write(self, entries: Sequence[SpoolEntry]) -> list[bool]:
        """Write entries. Returns for each whether it was stored. If not all fit, those with reserved space are written."""
        try:
            if await self._append(entries):
                return [True] * len(entries)
        except SpoolFull as error:
            reserved = [entry for entry in entries if entry[1] and entry[0].id in self._reserved]
            ended = bool(reserved) and await self._append_reserved(reserved)
            self._rejected(str(error), len(entries) - len(reserved) * ended)
            written = {id(entry) for entry in reserved if ended}
            return [id(entry) in written for entry in entries]
        self._rejected(self.problem or "", len(entries))
        return [False] * len(entries)

    async def _append_reserved(self, entries: Sequence[SpoolEntry]) -> bool:
        try:
            return await self._append(entries)
        except SpoolFull:  # The size limit is smaller than that of the previous process, or names are unusually long.
            return False

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


def _call(callback: Callable[[bool], None], *, stored: bool) -> None:
    with LoggedFaults("spool callback failed"):  # An error in one callback must not affect the others.
        callback(stored)


log = structlog.get_logger("gateway")

CALL_SIZE = 256
INTERVAL_S = 0.1
PAUSE_S = 0.005
DEAD_EVERY_S = 10.0
STOP_TIMEOUT_S = 1.0

T = TypeVar("T")
Args = TypeVarTuple("Args")


class SpoolMerge:
    """Merges spool files into Redis while `redis_available`. `clock`: monotonic seconds.

    `remember` receives the adopted pairs, since Redis may lose them before the auditor has written them.
    """

    def __init__(
        self,
        spool: Spool,
        thread: ThreadPoolExecutor,
        adoption: Adoption,
        *,
        redis_available: Callable[[], bool],
        remember: Callable[[Sequence[Pair]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._thread = thread
        self._adoption = adoption
        self._redis_available = redis_available
        self._remember = remember
        self._clock = clock
        self._dead_at = 0.0  # When to look for files of stopped gateways again.
        self._offsets: dict[Path, int] = {}  # Merged bytes of files that are not completely merged.
        self.merged = 0

    async def run(self) -> None:
        """Merge whenever there are files and Redis responds; never returns."""
        while True:
            await next_tick(INTERVAL_S)
            if not self._redis_available():
                continue
            with LoggedFaults("merging the spool failed"):
                with suppress(TierlaneError):  # Redis is unavailable again.
                    await self.merge()
                continue
            await asyncio.sleep(RETRY_S)

    async def merge_last(self) -> None:
        """Merge for at most STOP_TIMEOUT_S before the gateway stops; the next gateway merges the rest."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.merge()
        except (TierlaneError, OSError, TimeoutError) as error:
            log.warning("spool not merged before stop", reason=str(error))

    async def merge(self) -> None:
        """Merge all files. Raises RedisUnavailable, and OSError if the files cannot be read."""
        if self._spool.bytes:
            await self._in_thread(self._spool.rotate)
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
            log.info("merged the spool of a stopped gateway", gateway=owner, files=len(paths))
        finally:
            await self._in_thread(self._spool.finish, owner, lock)

    async def _merge_file(self, path: Path) -> None:
        while True:
            offset = self._offsets.get(path, 0)
            part = await self._in_thread(self._spool.read, path, offset, CALL_SIZE)
            if part.entries:
                pairs = [(accepted, ended) for accepted, ended in part.entries if ended]
                await self._adoption.adopt([*_unended(part.entries, pairs), *pairs])
                self._remember(pairs)
                self.merged += len(part.entries)
            if part.bad:
                log.error("unreadable lines in the spool", file=path.name, lines=len(part.bad))
                await self._in_thread(self._spool.set_aside, path, part.bad)
            if part.next_offset == offset:
                break
            self._offsets[path] = part.next_offset
            await asyncio.sleep(PAUSE_S)
        failpoint("spool_unremoved")
        await self._in_thread(self._spool.remove, path)
        self._offsets.pop(path, None)

    async def _in_thread(self, function: Callable[[*Args], T], *args: *Args) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _unended(entries: Sequence[SpoolEntry], pairs: Sequence[Pair]) -> list[SpoolEntry]:
    """The accepted records without a pair."""
    repeated = {ended.id for _, ended in pairs}
    return [entry for entry in entries if entry[0].id not in repeated]


class DirectAudit:
    """The audit of direct mode; without a `data_dir` it stays closed.

    `redis_available`: whether to merge. `remember`: receives the adopted pairs.
    """

    def __init__(
        self,
        data_dir: Path | None,
        gateway_id: str,
        max_bytes: int,
        adoption: Adoption,
        *,
        redis_available: Callable[[], bool],
        remember: Callable[[Sequence[Pair]], None],
    ) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._data_dir = data_dir
        self.spool = Spool((data_dir or Path()) / FOLDER, gateway_id, max_bytes)
        self.writer = SpoolWriter(self.spool, self._thread)
        self._merge = SpoolMerge(self.spool, self._thread, adoption, redis_available=redis_available, remember=remember)
        self._redis_available = redis_available
        self._problem: str | None = None
        self.opened = False

    def open(self) -> None:
        """Open and lock the files. If this fails, the gateway has no direct mode, and health reports the reason."""
        if self._data_dir is None:
            return
        try:
            self.spool.open()
        except SpoolError as error:
            self._problem = str(error)
            log.warning("direct mode is not available", reason=str(error))
        else:
            self.opened = True

    @property
    def accepts(self) -> bool:
        """Whether records can be written now."""
        return self.opened and not self.writer.rejecting

    @property
    def problem(self) -> str | None:
        """The reason why records cannot be written, in a sentence, or None."""
        if self._problem is None and self.opened and self.spool.full:
            return f"The spool is full: {self.spool.bytes} bytes wait for Redis."
        return self._problem or self.writer.problem

    def loops(self) -> dict[str, Loop]:
        """The background tasks of the gateway for the spool."""
        return {"spool writer": self.writer.run, "spool merge": self._merge.run} if self.opened else {}

    def record(self, entry: SpoolEntry, callback: Callable[[bool], None]) -> None:
        """Write an entry. `callback` receives whether it was stored."""
        self.writer.add(entry, callback)

    def release(self, request_id: str) -> None:
        """Release the space reserved for the ended record of a request."""
        self.writer.release(request_id)

    async def close(self) -> None:
        """Write queued entries, merge them if Redis responds, and close the files."""
        if self.opened:
            await self.writer.flush()
            if self._redis_available():
                await self._merge.merge_last()
            self.spool.close()
        self._thread.shutdown(wait=False)
