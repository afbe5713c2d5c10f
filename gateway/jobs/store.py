"""Jobs in PostgreSQL for the handlers: stored and found in coalesced calls, on connections of their own.

Everything that arrives while the previous call is under way shares the next one. There is no timer, no added wait when
idle, and no loop: a run begins with the first caller and ends when nobody waits.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from asyncpg import PostgresError

from ledger.jobs import JobEnd, JobRow, JobSession, NewJob, StoreUnavailable, end_jobs, find_jobs, insert_jobs
from scheduler.protocol.admission import Submission

T = TypeVar("T")
R = TypeVar("R")

MOST_PENDING = 4096


class TooManyWait(Exception):
    """More wait for the next call than may."""


class CallBatcher(Generic[T, R]):
    """`call` takes up to `size` items and gives an answer to each, in order; one that is an exception is raised."""

    def __init__(self, call: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]], size: int = 256) -> None:
        self._call = call
        self._size = size
        self._pending: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._running: asyncio.Task[None] | None = None
        self.calls = 0

    async def ask(self, item: T) -> R:
        """The answer for this item. Raises TooManyWait, and what the call raises."""
        if len(self._pending) >= MOST_PENDING:
            raise TooManyWait
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.append((item, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="coalesced calls")
        return await future

    async def _run(self) -> None:
        try:
            while self._pending:
                group = [self._pending.popleft() for _ in range(min(self._size, len(self._pending)))]
                await self._answer([(item, future) for item, future in group if not future.done()])
        finally:
            self._running = None

    async def _answer(self, group: list[tuple[T, "asyncio.Future[R]"]]) -> None:
        if not group:
            return
        self.calls += 1
        try:
            answers: Sequence[R | Exception] = await self._call([item for item, _ in group])
        except asyncio.CancelledError:
            for _, future in group:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to those who wait
            answers = [error] * len(group)
        for (_, future), answer in zip(group, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    async def close(self) -> None:
        """End what is under way; whoever waits is cancelled."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()


LARGEST = 64  # Bodies are up to a hundred KB each.


class JobStore:
    """All raise StoreUnavailable where PostgreSQL is away, or where too many ask already."""

    def __init__(self, database_url: str, pool: str, kept_s: float) -> None:
        self._pool = pool
        self._kept_s = kept_s
        self._writing = JobSession(database_url, "tierlane-jobs-in")
        self._reading = JobSession(database_url, "tierlane-jobs-read")
        self._inserts: CallBatcher[NewJob, None] = CallBatcher(self._insert, LARGEST)
        self._reads: CallBatcher[str, JobRow | None] = CallBatcher(self._find)

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
