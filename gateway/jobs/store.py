"""Jobs as the handlers see them: taken in and found, each by a connection of its own and with all who ask at once."""

from collections.abc import Sequence

from asyncpg import PostgresError

from gateway.jobs_together import Together, TooManyWait
from ledger.job_session import JobSession, StoreUnavailable
from ledger.jobs import JobEnd, JobRow, NewJob, end_jobs, find_jobs, insert_jobs
from scheduler.protocol.admission import Submission

LARGEST = 64  # Bodies are up to a hundred KB each.


class JobStore:
    """All raise StoreUnavailable where PostgreSQL is away, or where too many ask already."""

    def __init__(self, database_url: str, pool: str, kept_s: float) -> None:
        self._pool = pool
        self._kept_s = kept_s
        self._writing = JobSession(database_url, "tierlane-jobs-in")
        self._reading = JobSession(database_url, "tierlane-jobs-read")
        self._inserts: Together[NewJob, None] = Together(self._insert, LARGEST)
        self._reads: Together[str, JobRow | None] = Together(self._find)

    async def insert(self, job: NewJob) -> None:
        """When this returns, the job is committed. Raises what asyncpg raises for values that cannot be stored."""
        try:
            await self._inserts.ask(job)
        except TooManyWait:
            raise StoreUnavailable("Too many jobs wait to be stored.") from None

    async def find(self, job_id: str, customer_id: str) -> JobRow | None:
        """How a job stands; None where it is not known, or another customer's."""
        try:
            row = await self._reads.ask(job_id)
        except TooManyWait:
            raise StoreUnavailable("Too many ask for results at once.") from None
        return row if row is not None and row.customer_id == customer_id else None

    async def end(self, end: JobEnd) -> None:
        """End one job, unless it has ended."""
        await self._writing.run(lambda connection: end_jobs(connection, [end], self._kept_s))

    async def close(self) -> None:
        """End what is under way."""
        await self._inserts.close()
        await self._reads.close()
        await self._writing.close()
        await self._reading.close()

    async def _insert(self, jobs: Sequence[NewJob]) -> Sequence[Exception | None]:
        try:
            await self._writing.run(lambda connection: insert_jobs(connection, jobs, self._pool))
        except (
            PostgresError
        ) as error:  # One that cannot be stored (its customer is gone) must not take the others along.
            return [error] if len(jobs) == 1 else [each for job in jobs for each in await self._insert([job])]
        return [None] * len(jobs)

    async def _find(self, ids: Sequence[str]) -> Sequence[JobRow | None]:
        found = await self._reading.run(lambda connection: find_jobs(connection, ids))
        return [found.get(job_id) for job_id in ids]


def new_job(submission: Submission, left_s: float, callback_url: str | None) -> NewJob:
    """What is stored of it."""
    return NewJob(
        id=submission.id,
        customer_id=submission.customer_id,
        api_key_id=submission.api_key_id,
        tier=submission.tier,
        model=submission.model,
        body=submission.body,
        left_s=left_s,
        trace_id=submission.trace_id,
        idempotency=submission.idempotency,
        fingerprint=submission.fingerprint,
        callback_url=callback_url,
    )
