"""The reconciler of jobs: ends in Redis are written to PostgreSQL, lost jobs are queued again, old ones are deleted.

A loop in every gateway, of which one is active: the one whose session holds an advisory lock, on which it also writes,
so a gateway that lost the lock cannot write. It keeps nothing that another could not read again: replies on the jobs'
channel are the fast way, and the paged scan of open jobs finds what was missed. After a possible loss (new
subscription, another epoch of Redis, a new active gateway) the scan goes through all of them without a pause. Lost jobs
are queued under their ids past all limits, since they were admitted before.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any

import structlog

from gateway.inference.admission import ENTERED, AdmissionLimits
from gateway.jobs.inbox import LEAST_LEFT_S, JobInbox, JobStep, end_of, given_up, next_step
from ledger.jobs import (
    DURABLE,
    FIRST_PAGE,
    JobEnd,
    NewJob,
    OpenJob,
    audit_jobs,
    end_jobs,
    note_requeued,
    open_bodies,
    open_jobs,
    purge_jobs,
)
from ledger.postgres import AWAY, Connection, closing, connect, reason
from ratelimit.limits import NO_LIMITS
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.fault_log import log_fault
from scheduler.payload import decode_payload
from scheduler.protocol.admission import Admissions, Submission, calls_of
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.replies import RequestStatus, RequestStatuses
from scheduler.redis_client.pipeline import Backoff
from scheduler.tasks import end_all


class Requeue:
    """Queues again by `admissions`; `limits` says which tiers there are."""

    def __init__(self, admissions: Admissions, limits: Callable[[], AdmissionLimits]) -> None:
        self._admissions = admissions
        self._limits = limits

    async def queue(self, jobs: Sequence[NewJob]) -> list[str]:
        """The ids that Redis has now. Raises RedisUnavailable.

        Left out is whose tier is gone from the catalog (it ends at its deadline), and whom Redis has no memory for.
        """
        limits = self._limits()
        names = {tier.name for tier in limits.tiers}
        chosen = [again(job) for job in jobs if job.tier in names]
        queued: list[str] = []
        for group in calls_of(chosen):
            verdicts = await self._admissions.admit(limits.tiers, limits.capacity_rps, group)
            queued += [s.id for s, verdict in zip(group, verdicts, strict=True) if verdict.outcome in ENTERED]
        return queued


def again(job: NewJob) -> Submission:
    """The submission of a job that was admitted before. Its limits play no part any more."""
    left_ms = max(1, int(job.left_s * 1000))
    return Submission(
        id=job.id,
        tier=job.tier,
        customer_id=job.customer_id,
        api_key_id=job.api_key_id,
        nonce="",  # Nobody waits at a connection.
        model=job.model,
        input_bytes=_input_bytes(job.body),
        total_ms=left_ms,
        queue_ms=left_ms,
        limits=NO_LIMITS,
        trace_id=job.trace_id,
        idempotency=job.idempotency,
        fingerprint=job.fingerprint,
        again=True,
        body=job.body,
    )


def _input_bytes(body: bytes) -> int:
    try:
        return len(decode_payload(body).input.encode())
    except ValueError:  # The worker will say so.
        return 0


log = structlog.get_logger("gateway")

PAGE = 512


class JobScan:
    """Looks at one pool's open jobs. `sweeping`: the next page is wanted at once."""

    def __init__(
        self, pool: str, stands: RequestStatuses, terminations: Terminations, requeue: Requeue, page: int = PAGE
    ) -> None:
        self._pool = pool
        self._stands = stands
        self._terminations = terminations
        self._requeue = requeue
        self._page = page
        self._after: tuple[datetime, str] = FIRST_PAGE
        self._epoch = b""
        self.sweeping = True
        self.requeued = 0

    def sweep(self) -> None:
        """Begin with the oldest, and go through all."""
        self._after, self.sweeping = FIRST_PAGE, True

    async def look(self, connection: Connection) -> list[JobEnd]:
        """The next page; those that Redis lost are queued again. Returns the ends that are to be written.

        After the last page it begins again. Raises what asyncpg raises; while Redis is away, only what is long overdue ends.
        """
        epoch = await self._seen_epoch()
        if epoch is not None and epoch != self._epoch:
            self._epoch = epoch
            self.sweep()
        page = await open_jobs(connection, self._pool, self._page, self._after)
        whole = len(page) == self._page
        self._after = (page[-1].created_at, page[-1].id) if whole else FIRST_PAGE
        self.sweeping = self.sweeping and whole
        if not page:
            return []
        return await self._decide(connection, page, None if epoch is None else await self._seen(page))

    async def _seen_epoch(self) -> bytes | None:
        try:
            return await self._stands.epoch()
        except TierlaneError:
            return None

    async def _seen(self, page: Sequence[OpenJob]) -> list[RequestStatus] | None:
        try:
            return await self._stands.fetch([job.id for job in page])
        except TierlaneError:
            self._epoch = b""  # So that all are looked at once it is back.
            return None

    async def _decide(
        self, connection: Connection, page: Sequence[OpenJob], stands: Sequence[RequestStatus] | None
    ) -> list[JobEnd]:
        ends: list[JobEnd] = []
        lost: list[str] = []
        overdue: list[str] = []
        for at, job in enumerate(page):
            stand = stands[at] if stands is not None else None
            step = next_step(job.left_s, stand)
            if step is JobStep.AGAIN:
                lost.append(job.id)
            elif step is JobStep.EXPIRE:
                overdue.append(job.id)
            elif step is JobStep.FAIL:
                ends.append(JobEnd(job.id, ErrorCode.DEADLINE_EXCEEDED))
            elif stand is not None and step is not JobStep.WAIT:
                ends.append(end_of(stand.reply) if stand.reply else given_up(job.id, stand))
        if lost:
            await self._queue_again(connection, lost)
        return ends + await self._expired(overdue)

    async def _expired(self, ids: Sequence[str]) -> list[JobEnd]:
        """The ends of those whose time is up, as Redis has them now."""
        try:
            replies = await self._terminations.cancel([(job_id, ErrorCode.DEADLINE_EXCEEDED) for job_id in ids])
        except TierlaneError:
            return []
        return [end_of(reply) for reply in replies if reply is not None]

    async def _queue_again(self, connection: Connection, ids: Sequence[str]) -> None:
        jobs = await open_bodies(connection, ids)
        try:
            queued = await self._requeue.queue([job for job in jobs if job.left_s >= LEAST_LEFT_S])
        except TierlaneError as error:
            log.info("jobs cannot be queued again yet", reason=str(error))
            self._epoch = b""
            return
        if queued:
            self.requeued += len(queued)
            log.warning("jobs_queued_again", count=len(queued))
            await note_requeued(connection, queued)


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


class JobReconciler:
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
        look: JobScan,
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
