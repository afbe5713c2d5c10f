"""The reconciler of jobs: writes ends from Redis to PostgreSQL, queues lost jobs again, and deletes expired ones.

Every gateway runs it, and one is active: the one whose session holds an advisory lock. It writes on that session, so a
gateway that has lost the lock cannot write. It keeps no state that another could not read again: replies on the jobs'
channel arrive fast, and the paged scan of open jobs finds those that were missed. After a possible loss (a new
subscription, another epoch of Redis, a new active gateway) the scan reads all open jobs without a pause.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from gateway.jobs.inbox import JobInbox
from gateway.jobs.scan import JobScan
from ledger.batches import audit_lines, purge_batches
from ledger.files import purge_files
from ledger.jobs import DURABLE, JobEnd, audit_jobs, end_jobs, purge_jobs
from ledger.postgres import (
    AWAY,
    JOBS_LOCK,
    LEADER_CONNECT_TIMEOUT_S,
    LEADER_SETTINGS,
    Connection,
    closing,
    connect,
    reason,
    wait_for_lock,
)
from ledger.responses import purge_responses
from scheduler.errors import TierlaneError
from scheduler.fault_log import log_fault
from scheduler.redis_client.backoff import Backoff
from scheduler.tasks import end_all

log = structlog.get_logger("gateway")

STATEMENT_TIMEOUT_MS = 5000
STANDBY_S = 1.0
SCAN_EVERY_S = 1.0
MAINTENANCE_EVERY_S = 5.0
AUDIT_AFTER_S = 15.0  # By then the auditor has written the row, unless its entry was lost.
MAINTENANCE_ROWS = 2000
WRITE_ROWS = 256
WRITE_BYTES = 4 << 20


class JobReconciler:
    """The reconciler of one pool. `kept_s`: how long results are kept. `clock` is monotonic seconds.

    `companions` returns the loops that run while this reconciler is active. After ends are written, `ended` is called, and
    `stored` with their ids, which may raise TierlaneError.
    """

    def __init__(
        self,
        database_url: str,
        pool: str,
        kept_s: float,
        *,
        inbox: JobInbox,
        scan: JobScan,
        stored: Callable[[Sequence[str]], Awaitable[object]],
        companions: Callable[[], Sequence[Coroutine[Any, Any, None]]],
        ended: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = database_url
        self._pool = pool
        self._kept_s = kept_s
        self._inbox = inbox
        self._scan = scan
        self._stored = stored
        self._companions = companions
        self._ended = ended
        self._audit_after_s = AUDIT_AFTER_S
        self._clock = clock
        self._scan_due = self._maintenance_due = 0.0
        self.active = False
        self.audited = 0  # Rows that were missing in the audit.

    async def run(self) -> None:
        """Run until cancelled."""
        backoff = Backoff(0.1, 2.0)
        while True:
            began = self._clock()
            try:
                await self._session()
            except AWAY as error:
                log.warning("jobs_not_kept", error=reason(error))
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("reconciling jobs failed", error)
            if self._clock() - began > SCAN_EVERY_S:  # Otherwise the same fault may repeat at once.
                backoff.reset()
            self.active = False
            await backoff.sleep()

    async def _session(self) -> None:
        connection = await connect(
            self._url,
            name="tierlane-jobs",
            connect_timeout_s=LEADER_CONNECT_TIMEOUT_S,
            statement_timeout_ms=STATEMENT_TIMEOUT_MS,
            settings=LEADER_SETTINGS | DURABLE,
        )
        async with closing(connection):
            await wait_for_lock(connection, JOBS_LOCK, self._pool, lambda: asyncio.sleep(STANDBY_S, result=True))
            self.active = True
            self._inbox.clear()
            self._scan.sweep()
            tasks = [asyncio.create_task(loop, name="jobs") for loop in self._companions()]
            try:
                while True:
                    await self._step(connection)
                    pause_s = 0.0 if self._scan.sweeping else self._scan_due - self._clock()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(0.0, pause_s)):
                            await self._inbox.arrived.wait()
            finally:
                await end_all(tasks)

    async def _step(self, connection: Connection) -> None:
        """Write new ends, and scan and maintain if due. Raises what asyncpg raises."""
        await self._write(connection, self._inbox.take())
        if self._inbox.lost:
            self._inbox.lost = False
            self._scan.sweep()
        now = self._clock()
        if self._scan.sweeping or now >= self._scan_due:
            self._scan_due = now + SCAN_EVERY_S
            await self._write(connection, await self._scan.next_page(connection))
        if now >= self._maintenance_due:
            self._maintenance_due = now + MAINTENANCE_EVERY_S
            self.audited += await audit_jobs(connection, self._pool, self._audit_after_s, MAINTENANCE_ROWS)
            self.audited += await audit_lines(connection, self._audit_after_s)
            await purge_jobs(connection, self._pool, MAINTENANCE_ROWS)
            await purge_responses(connection, MAINTENANCE_ROWS)
            await purge_files(connection)
            await purge_batches(connection)

    async def _write(self, connection: Connection, ends: Sequence[JobEnd]) -> None:
        for group in write_groups(ends):
            written = await end_jobs(connection, group, self._kept_s)
            self._inbox.written(written)
            if written:
                self._ended()
                with contextlib.suppress(TierlaneError):  # Redis then keeps their replies, and its memory, for longer.
                    await self._stored(list(written))


def write_groups(ends: Sequence[JobEnd]) -> list[list[JobEnd]]:
    """The ends of each statement, since outputs may be large. Of two ends of one job the first is used."""
    found: list[list[JobEnd]] = []
    size = 0
    for end in {end.id: end for end in reversed(ends)}.values():
        if not found or size + len(end.output) > WRITE_BYTES or len(found[-1]) >= WRITE_ROWS:
            found.append([])
            size = 0
        found[-1].append(end)
        size += len(end.output)
    return found
