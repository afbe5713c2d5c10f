"""The spool put together: its file, who writes it, who merges it, and what health is told. Without it nothing is direct."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from gateway.audit_pairs import Note, Pair
from gateway.direct.spool import FOLDER, Spool, SpoolError
from gateway.direct.spool_tasks import SpoolWriter
from gateway.spool_merge import AdoptCall, SpoolMerge
from scheduler.tasks import Loop

log = structlog.get_logger("gateway")


class DirectAudit:
    """The audit of direct mode; without a `data_dir` it never begins.

    `may_merge` says whether Redis answers, `remember` is given what Redis has been told.
    """

    def __init__(
        self,
        data_dir: Path | None,
        gateway_id: str,
        max_bytes: int,
        adoption: AdoptCall,
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
