"""Merges the audit spool into Redis.

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
from typing import TypeVar, TypeVarTuple

import structlog

from gateway.direct.spool import Spool
from gateway.inference.audit_pairs import Pair
from scheduler.errors import TierlaneError
from scheduler.failpoints import failpoint
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.adoption import Adoption
from scheduler.tasks import next_tick

log = structlog.get_logger("gateway")

CALL_SIZE = 256
INTERVAL_S = 0.1
PAUSE_S = 0.005
RETRY_S = 1.0  # After a fault.
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
                found = await self._in_thread(self._spool.take_over, owner)
                if found is None:
                    continue
                lock, paths = found
                try:
                    for path in paths:
                        await self._merge_file(path)
                    log.info("merged the spool of a stopped gateway", gateway=owner, files=len(paths))
                finally:
                    await self._in_thread(self._spool.finish, owner, lock)
            self._dead_at = self._clock() + DEAD_EVERY_S

    async def _merge_file(self, path: Path) -> None:
        while True:
            offset = self._offsets.get(path, 0)
            part = await self._in_thread(self._spool.read, path, offset, CALL_SIZE)
            if part.entries:
                pairs = [(accepted, ended) for accepted, ended in part.entries if ended]
                ended_ids = {ended.id for _, ended in pairs}
                unended = [entry for entry in part.entries if entry[0].id not in ended_ids]
                await self._adoption.adopt([*unended, *pairs])
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
