"""Asynchronous jobs in PostgreSQL: stored, found, ended once, delivered, audited, deleted.

Every function is one statement on a connection, so it is done or not done; all raise what asyncpg raises. Times are
PostgreSQL's: only seconds left go in and out. The connection is made when it is needed, made again when it was lost,
and never waited for long: while PostgreSQL is unavailable callers fail at once, and it is tried again at most twice a
second.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

import asyncpg
import msgspec

from ledger.postgres import AWAY, Connection, closing, connect, reason, statement
from scheduler.errors import HTTP, TierlaneError
from scheduler.request_id import created_at

MOST_COUNTED = 2**31 - 1
FIRST_PAGE = (datetime(1970, 1, 1, tzinfo=UTC), "")
_HTTP_STATUSES = json.dumps({code.value: row.status for code, row in HTTP.items()})


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is taken in; it fails where it has not ended after `left_s`."""

    id: str
    customer_id: str
    api_key_id: str
    tier: str
    model: str
    body: bytes
    left_s: float
    trace_id: str = ""
    idempotency: str = ""
    fingerprint: str = ""
    callback_url: str | None = None


class JobRow(msgspec.Struct, frozen=True):
    """How a job stands."""

    id: str
    customer_id: str
    status: str
    output: bytes | None
    error_code: str | None
    pool: str = "default"

    @property
    def ended(self) -> bool:
        """Whether it is final."""
        return self.status in ("completed", "failed")


class OpenJob(msgspec.Struct, frozen=True):
    """A job that has not ended here. `left_s` is below 0 once its deadline has passed."""

    id: str
    created_at: datetime
    tier: str
    left_s: float


class JobEnd(msgspec.Struct, frozen=True):
    """How a job ended. `customer_id` is compared where it is known; `output`: of a failure, what the backend said."""

    id: str
    error_code: str  # "" for a completed one
    output: str = ""
    customer_id: str = ""
    tokens_used: int = 0


class Callback(msgspec.Struct, frozen=True):
    """An end that is to be told now; the result, which is read when it is told, is kept for `left_s` more."""

    id: str
    customer_id: str
    host: str
    url: str
    tries: int
    left_s: float


async def insert_jobs(connection: Connection, jobs: Sequence[NewJob], pool: str) -> None:
    """Take all of them in; when this returns they are committed. One that is there already stays as it is."""
    columns = (
        [job.id for job in jobs],
        [created_at(job.id) for job in jobs],
        [job.customer_id for job in jobs],
        [job.api_key_id for job in jobs],
        [job.tier for job in jobs],
        [job.model for job in jobs],
        [job.body for job in jobs],
        [job.left_s for job in jobs],
        [job.trace_id or None for job in jobs],
        [job.idempotency or None for job in jobs],
        [job.fingerprint or None for job in jobs],
        [job.callback_url for job in jobs],
    )
    await connection.execute(statement("jobs_insert"), *columns, pool)


async def find_jobs(connection: Connection, ids: Sequence[str]) -> dict[str, JobRow]:
    """Those of them that are known, by id."""
    rows = await connection.fetch(statement("jobs_find"), ids)
    return {row["id"]: JobRow(*row) for row in rows}


async def open_jobs(
    connection: Connection, pool: str, limit: int, after: tuple[datetime, str] = FIRST_PAGE
) -> list[OpenJob]:
    """The oldest open jobs of a pool after one that was on the page before."""
    return [OpenJob(*row) for row in await connection.fetch(statement("jobs_open"), pool, *after, limit)]


async def job_pools(connection: Connection) -> set[str]:
    """The pools whose jobs still want something: their end, to be told, audited or deleted."""
    return {row["pool"] for row in await connection.fetch(statement("jobs_pools"))}


async def open_bodies(connection: Connection, ids: Sequence[str]) -> list[NewJob]:
    """What is needed to queue these again; those that have ended are left out."""
    rows = await connection.fetch(statement("jobs_bodies"), ids)
    known = ({name: value for name, value in row.items() if value is not None} for row in rows)
    return [msgspec.convert(fields, NewJob) for fields in known]


async def note_requeued(connection: Connection, ids: Sequence[str]) -> None:
    """Count that these were queued again."""
    await connection.execute(statement("jobs_requeued"), ids)


async def end_jobs(connection: Connection, ends: Sequence[JobEnd], kept_s: float) -> set[str]:
    """End each job that is still open, and keep its result for `kept_s`. Returns the ids of those that ended by this."""
    columns = (
        [end.id for end in ends],
        [end.customer_id for end in ends],
        ["failed" if end.error_code else "completed" for end in ends],
        [None if end.error_code and not end.output else end.output.encode() for end in ends],
        [end.error_code or None for end in ends],
        [min(end.tokens_used, MOST_COUNTED) if end.tokens_used > 0 else None for end in ends],
    )
    return {row["id"] for row in await connection.fetch(statement("jobs_end"), *columns, kept_s)}


async def audit_jobs(connection: Connection, pool: str, after_s: float, limit: int) -> int:
    """See that jobs which ended `after_s` ago are in the audit. Returns how many rows it lacked."""
    return int(await connection.fetchval(statement("jobs_audit"), pool, after_s, limit, _HTTP_STATUSES) or 0)


async def purge_jobs(connection: Connection, pool: str, limit: int) -> int:
    """Delete what was kept long enough. Returns how many."""
    return int((await connection.execute(statement("jobs_purge"), pool, limit)).rpartition(" ")[2])


class CallbackLimits(NamedTuple):
    """What one look for callbacks may return: so many rows, of one host and of one customer; none of `but` nor of `paused`."""

    rows: int
    of_a_host: int
    of_a_customer: int
    but: Sequence[str] = ()
    paused: Sequence[str] = ()  # `customer host`.


async def due_callbacks(connection: Connection, pool: str, limits: CallbackLimits) -> list[Callback]:
    """Ends that are to be told now, those first that were tried least."""
    rows, of_a_host, of_a_customer, but, paused = limits
    found = await connection.fetch(statement("jobs_callbacks"), pool, rows, of_a_host, but, of_a_customer, paused)
    return [Callback(*row) for row in found]


async def note_told(connection: Connection, job_id: str, again_s: float | None) -> None:
    """An end was told, or tried: it is tried once more in `again_s`, or not any more (None)."""
    await connection.execute(statement("jobs_told"), job_id, again_s)


T = TypeVar("T")

STATEMENT_TIMEOUT_MS = 1500
CONNECT_TIMEOUT_S = 1.0
SORRY_S = 0.5
# What was promised must be on the disk, whatever the server does by default.
DURABLE = {"synchronous_commit": "on"}
_OUR_FAULT = (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError)
"""What says nothing against the connection."""


class StoreUnavailable(TierlaneError):
    """PostgreSQL did not answer in time or not at all; whether the work took effect is unknown."""


class JobSession:
    """Runs one piece of work at a time. `name` is seen in pg_stat_activity; `clock` is monotonic seconds."""

    def __init__(self, database_url: str, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = database_url
        self._name = name
        self._clock = clock
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do it; it must bear being done twice, since a connection may be found lost. Raises StoreUnavailable.

        What PostgreSQL refuses because of its values is raised as asyncpg raises it.
        """
        async with self._turn:
            if self._clock() < self._not_before:
                raise StoreUnavailable("PostgreSQL was away a moment ago.")
            was_there = self._connection is not None
            try:
                try:
                    return await self._tried(work)
                except AWAY as error:
                    if not was_there or isinstance(error, _OUR_FAULT):
                        raise
                    return await self._tried(work)
            except _OUR_FAULT:
                raise
            except AWAY as error:
                self._not_before = self._clock() + SORRY_S
                raise StoreUnavailable(f"PostgreSQL did not answer: {reason(error)}.") from error

    async def _tried(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        connection = self._connection
        if connection is None or connection.is_closed():
            connection = self._connection = await connect(
                self._url,
                name=self._name,
                connect_timeout_s=CONNECT_TIMEOUT_S,
                statement_timeout_ms=STATEMENT_TIMEOUT_MS,
                settings=DURABLE,
            )
        try:
            return await work(connection)
        except _OUR_FAULT:
            raise
        except BaseException:  # A cancel among it: a connection with an answer on its way is not used again.
            connection.terminate()
            self._connection = None
            raise

    async def close(self) -> None:
        """End the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            async with closing(connection):
                pass
