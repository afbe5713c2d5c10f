"""The scan of open jobs, page by page: their ends as far as Redis has them, and lost jobs are queued again.

Lost jobs are queued under their ids without checks of limits, since they were admitted before.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime

import structlog

from gateway.inference.admission import ENTERED, AdmissionLimits
from gateway.jobs.job_end import end_of, end_without_reply
from gateway.jobs.next_step import LEAST_LEFT_S, JobStep, next_step
from ledger.jobs import FIRST_PAGE, JobEnd, OpenJob, count_requeue, open_jobs, open_submissions
from ledger.postgres import Connection
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.protocol.admission import Admissions, calls_of
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.request_status import RequestStatus, RequestStatuses

log = structlog.get_logger("gateway")

PAGE = 512


class JobScan:
    """Scans the open jobs of one pool, page by page. `limits` has the tiers; `sweeping`: the next page is due at once."""

    def __init__(
        self,
        pool: str,
        statuses: RequestStatuses,
        terminations: Terminations,
        admissions: Admissions,
        limits: Callable[[], AdmissionLimits],
    ) -> None:
        self._pool = pool
        self._statuses = statuses
        self._terminations = terminations
        self._admissions = admissions
        self._limits = limits
        self._page = PAGE
        self._after: tuple[datetime, str] = FIRST_PAGE
        self._epoch = b""
        self.sweeping = True
        self.requeued = 0

    def sweep(self) -> None:
        """Start at the oldest job, and scan all without a pause."""
        self._after, self.sweeping = FIRST_PAGE, True

    async def next_page(self, connection: Connection) -> list[JobEnd]:
        """Scan the next page and queue lost jobs again. Returns the ends to write.

        The first page follows the last. While Redis is not available, only jobs long after their deadlines end. Raises what
        asyncpg raises.
        """
        try:
            epoch = await self._statuses.epoch()
        except TierlaneError:
            epoch = None
        if epoch is not None and epoch != self._epoch:
            self._epoch = epoch
            self.sweep()
        page = await open_jobs(connection, self._pool, self._page, self._after)
        whole = len(page) == self._page
        self._after = (page[-1].created_at, page[-1].id) if whole else FIRST_PAGE
        self.sweeping = self.sweeping and whole
        statuses: Sequence[RequestStatus | None] = [None] * len(page)
        if page and epoch is not None:
            try:
                statuses = await self._statuses.fetch([job.id for job in page])
            except TierlaneError:
                self._epoch = b""  # All are scanned when Redis is available again.
        return await self._decide(connection, page, statuses)

    async def _decide(
        self, connection: Connection, page: Sequence[OpenJob], statuses: Sequence[RequestStatus | None]
    ) -> list[JobEnd]:
        ends: list[JobEnd] = []
        lost: list[str] = []
        overdue: list[str] = []
        for job, known in zip(page, statuses, strict=True):
            step = next_step(job.left_s, known)
            if step is JobStep.AGAIN:
                lost.append(job.id)
            elif step is JobStep.EXPIRE:
                overdue.append(job.id)
            elif step is JobStep.FAIL:
                ends.append(JobEnd(job.id, ErrorCode.DEADLINE_EXCEEDED))
            elif known is not None and step is not JobStep.WAIT:
                ends.append(end_of(known.reply) if known.reply else end_without_reply(job.id, known))
        if lost:
            await self._queue_again(connection, lost)
        with contextlib.suppress(TierlaneError):
            expired = await self._terminations.cancel([(job_id, ErrorCode.DEADLINE_EXCEEDED) for job_id in overdue])
            ends += [end_of(reply) for reply in expired if reply is not None]
        return ends

    async def _queue_again(self, connection: Connection, ids: Sequence[str]) -> None:
        """Jobs whose tier was deleted are left out and fail at their deadlines."""
        jobs = await open_submissions(connection, ids)
        limits = self._limits()
        tiers = {tier.name for tier in limits.tiers}
        chosen = [job for job in jobs if job.total_ms >= LEAST_LEFT_S * 1000 and job.tier in tiers]
        queued: list[str] = []
        try:
            for group in calls_of(chosen):
                verdicts = await self._admissions.admit(limits.tiers, limits.capacity_rps, group)
                queued += [s.id for s, verdict in zip(group, verdicts, strict=True) if verdict.outcome in ENTERED]
        except TierlaneError as error:
            log.info("jobs cannot be queued again yet", reason=str(error))
            self._epoch = b""
            return
        if queued:
            self.requeued += len(queued)
            log.warning("jobs_queued_again", count=len(queued))
            await count_requeue(connection, queued)
