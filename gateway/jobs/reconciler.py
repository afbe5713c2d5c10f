"""The keeper of jobs: what ended in Redis ends in PostgreSQL, what Redis lost is queued again, what is old is deleted.

A loop in every gateway, of which one is active: the one whose own session holds an advisory lock, on which it also
writes; so whoever has lost the lock can no longer write. It keeps nothing that another could not read again: replies on
the jobs' channel are the fast way, and the look at open jobs (gateway/jobs_look.py) finds what was missed.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from gateway.endless import end_all
from gateway.jobs.inbox import JobInbox
from gateway.jobs_look import JobLook
from ledger.job_session import DURABLE
from ledger.jobs import JobEnd, audit_jobs, end_jobs, purge_jobs
from ledger.postgres import AWAY, Connection, closing, connect, reason
from scheduler.backoff import Backoff
from scheduler.errors import TierlaneError
from scheduler.fault_log import log_fault

log = structlog.get_logger("gateway")

JOBS_LOCK = 7_436_003
LOCK = "SELECT pg_try_advisory_lock($1, hashtext($2))"
HUNG_SESSION = {"idle_session_timeout": "15s", "idle_in_transaction_session_timeout": "10s"}
CONNECT_TIMEOUT_S = 3.0
STATEMENT_TIMEOUT_MS = 5000
STANDBY_S = 1.0
LOOK_EVERY_S = 1.0
CHORES_EVERY_S = 5.0
AUDIT_AFTER_S = 15.0  # By then the auditor has written it, unless its entry was lost.
CHORE_ROWS = 2000
WRITE_ROWS = 256
WRITE_BYTES = 4 << 20

Stored = Callable[[Sequence[str]], Awaitable[object]]
Beside = Callable[[], Sequence[Coroutine[Any, Any, None]]]


class JobKeeper:
    """One keeper of one pool. `beside`: loops that run while it is the active one; `ended` is called after ends were
    written, and `stored`, which may raise TierlaneError, with their ids. `kept_s`: how long results are kept. `clock`:
    monotonic seconds.
    """

    def __init__(
        self,
        database_url: str,
        pool: str,
        kept_s: float,
        *,
        inbox: JobInbox,
        look: JobLook,
        stored: Stored,
        beside: Beside = tuple,
        ended: Callable[[], None] = lambda: None,
        audit_after_s: float = AUDIT_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = database_url
        self._pool = pool
        self._kept_s = kept_s
        self._inbox = inbox
        self._look = look
        self._stored = stored
        self._beside = beside
        self._ended = ended
        self._audit_after_s = audit_after_s
        self._clock = clock
        self._look_due = self._chores_due = 0.0
        self.active = False
        self.audited = 0  # Rows that the audit lacked.

    async def run(self) -> None:
        """Keep jobs; never ends by itself."""
        backoff = Backoff(0.1, 2.0)
        while True:
            began = self._clock()
            try:
                await self._session()
            except AWAY as error:
                log.warning("jobs_not_kept", error=reason(error))
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("keeping jobs failed", error)
            if self._clock() - began > LOOK_EVERY_S:  # Else what ended it may do so again and again.
                backoff.reset()
            self.active = False
            await backoff.sleep()

    async def _session(self) -> None:
        connection = await connect(
            self._url,
            name="tierlane-jobs",
            connect_timeout_s=CONNECT_TIMEOUT_S,
            statement_timeout_ms=STATEMENT_TIMEOUT_MS,
            settings=HUNG_SESSION | DURABLE,
        )
        async with closing(connection):
            await self._locked(connection)
            self.active = True
            self._inbox.clear()
            self._look.sweep()
            tasks = [asyncio.create_task(loop, name="jobs") for loop in self._beside()]
            try:
                while True:
                    await self._turn(connection)
                    await self._rest()
            finally:
                await end_all(tasks)

    async def _locked(self, connection: Connection) -> None:
        """Wait until this session is the keeper's."""
        while True:
            if await connection.fetchval(LOCK, JOBS_LOCK, self._pool):
                return
            await asyncio.sleep(STANDBY_S)

    async def _rest(self) -> None:
        """Until a reply comes, or the next look is due."""
        pause_s = 0.0 if self._look.sweeping else self._look_due - self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, pause_s)):
                await self._inbox.arrived.wait()

    async def _turn(self, connection: Connection) -> None:
        """Write what came, look at some, do the chores. Raises what asyncpg raises."""
        await self._write(connection, self._inbox.take())
        if self._inbox.lost:
            self._inbox.lost = False
            self._look.sweep()
        now = self._clock()
        if self._look.sweeping or now >= self._look_due:
            self._look_due = now + LOOK_EVERY_S
            await self._write(connection, await self._look.look(connection))
        if now >= self._chores_due:
            self._chores_due = now + CHORES_EVERY_S
            self.audited += await audit_jobs(connection, self._pool, self._audit_after_s, CHORE_ROWS)
            await purge_jobs(connection, self._pool, CHORE_ROWS)

    async def _write(self, connection: Connection, ends: Sequence[JobEnd]) -> None:
        for group in groups(ends):
            written = await end_jobs(connection, group, self._kept_s)
            self._inbox.written(written)
            if written:
                self._ended()
                with contextlib.suppress(TierlaneError):  # Then Redis keeps them for longer, and needs memory for them.
                    await self._stored(list(written))


def groups(ends: Sequence[JobEnd]) -> list[list[JobEnd]]:
    """What each statement writes: outputs may be large. An id stands in one group once, with its first end."""
    found: list[list[JobEnd]] = []
    size = 0
    for end in {end.id: end for end in reversed(ends)}.values():
        if not found or size + len(end.output) > WRITE_BYTES or len(found[-1]) >= WRITE_ROWS:
            found.append([])
            size = 0
        found[-1].append(end)
        size += len(end.output)
    return found
