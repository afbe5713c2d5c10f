"""The audit of direct mode: the spool with its writer and its merge."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from gateway.direct.spool import FOLDER, Spool, SpoolError
from gateway.direct.spool_merge import SpoolMerge
from gateway.direct.spool_writer import SpoolWriter
from gateway.inference.audit_pairs import Pair, SpoolEntry
from scheduler.protocol.adoption import Adoption
from scheduler.tasks import Loop

log = structlog.get_logger("gateway")


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
