"""The look at open jobs, a page at a time: whose end Redis has, whom it has lost, whose time is up.

It finds what the jobs' channel missed. After a loss (the subscription was made anew, Redis has another epoch, somebody has
just become the active keeper) it goes through all of them without a pause.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

import structlog

from gateway.cancels import CancelCall
from gateway.jobs_again import Requeue
from gateway.jobs_ends import LEAST_LEFT_S, Step, end_of, given_up, next_step
from ledger.jobs import FIRST_PAGE, JobEnd, OpenJob, note_requeued, open_bodies, open_jobs
from ledger.postgres import Connection
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.stands import Stand

log = structlog.get_logger("gateway")

PAGE = 512


class StandCalls(Protocol):
    """`Stands`, as far as it is used here."""

    async def epoch(self) -> bytes: ...

    async def fetch(self, ids: Sequence[str]) -> list[Stand]: ...


class JobLook:
    """Looks at one pool's open jobs. `sweeping`: the next page is wanted at once."""

    def __init__(self, pool: str, stands: StandCalls, endings: CancelCall, requeue: Requeue, page: int = PAGE) -> None:
        self._pool = pool
        self._stands = stands
        self._endings = endings
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

    async def _seen(self, page: Sequence[OpenJob]) -> list[Stand] | None:
        try:
            return await self._stands.fetch([job.id for job in page])
        except TierlaneError:
            self._epoch = b""  # So that all are looked at once it is back.
            return None

    async def _decide(
        self, connection: Connection, page: Sequence[OpenJob], stands: Sequence[Stand] | None
    ) -> list[JobEnd]:
        ends: list[JobEnd] = []
        lost: list[str] = []
        overdue: list[str] = []
        for at, job in enumerate(page):
            stand = stands[at] if stands is not None else None
            step = next_step(job.left_s, stand)
            if step is Step.AGAIN:
                lost.append(job.id)
            elif step is Step.EXPIRE:
                overdue.append(job.id)
            elif step is Step.FAIL:
                ends.append(JobEnd(job.id, ErrorCode.DEADLINE_EXCEEDED))
            elif stand is not None and step is not Step.WAIT:
                ends.append(end_of(stand.reply) if stand.reply else given_up(job.id, stand))
        if lost:
            await self._queue_again(connection, lost)
        return ends + await self._expired(overdue)

    async def _expired(self, ids: Sequence[str]) -> list[JobEnd]:
        """The ends of those whose time is up, as Redis has them now."""
        try:
            replies = await self._endings.cancel([(job_id, ErrorCode.DEADLINE_EXCEEDED) for job_id in ids])
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
