"""Inserts and lookups of jobs for the handlers, in coalesced calls on two connections.

Items that arrive during a call share the next call. There is no timer, so an idle gateway adds no delay.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from asyncpg import PostgresError

from ledger.jobs import JobEnd, JobRow, JobSession, NewJob, StoreUnavailable, end_jobs, find_jobs, insert_jobs

T = TypeVar("T")
R = TypeVar("R")

MAX_PENDING = 4096

MAX_INSERTS = 64  # A body may have a hundred KB.


class CallBatcher(Generic[T, R]):
    """`call` takes up to `size` items and returns a result for each, in order; results that are exceptions are raised."""

    def __init__(self, call: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]], size: int = 256) -> None:
        self._call = call
        self._size = size
        self._pending: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._running: asyncio.Task[None] | None = None
        self.calls = 0

    async def run(self, item: T) -> R:
        """The result for this item. Raises StoreUnavailable if too many items wait, and what the call raises."""
        if len(self._pending) >= MAX_PENDING:
            raise StoreUnavailable("Too many calls wait for PostgreSQL.")
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.append((item, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run_all(), name="coalesced calls")
        return await future

    async def _run_all(self) -> None:
        try:
            while self._pending:
                group = [self._pending.popleft() for _ in range(min(self._size, len(self._pending)))]
                await self._run_group([(item, future) for item, future in group if not future.done()])
        finally:
            self._running = None

    async def _run_group(self, group: list[tuple[T, "asyncio.Future[R]"]]) -> None:
        if not group:
            return
        self.calls += 1
        try:
            results: Sequence[R | Exception] = await self._call([item for item, _ in group])
        except asyncio.CancelledError:
            for _, future in group:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - raised to the callers
            results = [error] * len(group)
        for (_, future), result in zip(group, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    async def close(self) -> None:
        """Cancel the call under way and all waiting callers."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()


class JobStore:
    """All methods raise StoreUnavailable if PostgreSQL is not available, or if too many calls wait for it."""

    def __init__(self, database_url: str, pool: str, kept_s: float) -> None:
        self._pool = pool
        self._kept_s = kept_s
        self._writing = JobSession(database_url, "tierlane-jobs-in")
        self._reading = JobSession(database_url, "tierlane-jobs-read")
        self._inserts: CallBatcher[NewJob, None] = CallBatcher(self._insert, MAX_INSERTS)
        self._reads: CallBatcher[str, JobRow | None] = CallBatcher(self._find)

    @property
    def problem(self) -> str | None:
        """Why the last insert failed, for a few seconds; None if it did not."""
        return self._writing.problem

    async def insert(self, job: NewJob) -> None:
        """Insert and commit a job. Raises what asyncpg raises for values that cannot be stored."""
        await self._inserts.run(job)

    async def find(self, job_id: str, customer_id: str) -> JobRow | None:
        """The job; None if it is unknown or belongs to another customer."""
        row = await self._reads.run(job_id)
        return row if row is not None and row.customer_id == customer_id else None

    async def end(self, end: JobEnd) -> None:
        """End a job, unless it has ended."""
        await self._writing.run(lambda connection: end_jobs(connection, [end], self._kept_s))

    async def close(self) -> None:
        await self._inserts.close()
        await self._reads.close()
        await self._writing.close()
        await self._reading.close()

    async def _insert(self, jobs: Sequence[NewJob]) -> Sequence[Exception | None]:
        try:
            await self._writing.run(lambda connection: insert_jobs(connection, jobs, self._pool))
        except (
            PostgresError
        ) as error:  # A job that cannot be stored (its customer was deleted) must not fail the others.
            return [error] if len(jobs) == 1 else [each for job in jobs for each in await self._insert([job])]
        return [None] * len(jobs)

    async def _find(self, ids: Sequence[str]) -> Sequence[JobRow | None]:
        found = await self._reading.run(lambda connection: find_jobs(connection, ids))
        return [found.get(job_id) for job_id in ids]
