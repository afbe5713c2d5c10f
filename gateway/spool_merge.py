"""The spool's way back into Redis: every note is adopted there, then its file is removed.

It begins as soon as Redis answers, while new requests still go past it, and leaves Redis time between two calls. A file
that was adopted and not removed, because this process died, is adopted again, which changes nothing. Files of gateways
that live no more are taken over: at start, and now and then. A beginning whose end is not in the file is told alone:
the end comes with a later file, or, where the gateway died, never, and then the auditor closes the row.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import structlog

from gateway.audit_pairs import Note, Pair
from gateway.direct.spool import Spool
from scheduler.errors import TierlaneError
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault

log = structlog.get_logger("gateway")

CALL_SIZE = 256
EVERY_S = 0.1
BREATH_S = 0.005
DEAD_EVERY_S = 10.0
RETRY_S = 1.0
LAST_S = 1.0

T = TypeVar("T")
Given = TypeVarTuple("Given")


class AdoptCall(Protocol):
    """`Adoption`, as far as the gateway uses it."""

    async def adopt(self, pairs: Sequence[Note]) -> object: ...


class SpoolMerge:
    """Merges while `may` says that Redis answers. `clock` is monotonic seconds.

    `remember` is given what Redis has been told, since it may die before the auditor has taken it.
    """

    def __init__(
        self,
        spool: Spool,
        thread: ThreadPoolExecutor,
        adoption: AdoptCall,
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
