"""Asynchronous jobs in PostgreSQL: insert, find, end, call back, audit, delete.

Each function is one statement on a connection, so it takes effect as a whole or not at all. All raise what asyncpg raises.
Times are PostgreSQL's: arguments and results have only the seconds that are left.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

import asyncpg
import msgspec

from ledger.catalog.webhook_secret import WebhookSecrets
from ledger.postgres import AWAY, Connection, closing, connect, reason, statement
from ratelimit.limits import NO_LIMITS
from scheduler.errors import HTTP, TierlaneError
from scheduler.payload import decode_payload
from scheduler.protocol.admission import Submission, SubmissionGroup
from scheduler.request_id import created_at

MAX_TOKENS_USED = 2**31 - 1
FIRST_PAGE = (datetime(1970, 1, 1, tzinfo=UTC), "")
HTTP_STATUSES = json.dumps({code.value: row.status for code, row in HTTP.items()})

STATEMENT_TIMEOUT_MS = 1500
CONNECT_TIMEOUT_S = 1.0
PAUSE_AFTER_FAILURE_S = 0.5
NEWS_S = 10.0
"""How long the outcome of an operation is reported if no other one is tried."""

UNTRIED = ""
"""The problem of a session that no recent operation has tried."""

DURABLE = {"synchronous_commit": "on"}
"""Accepted jobs must be on the disk, whatever the default of the server is."""

T = TypeVar("T")

_DATA_ERRORS = (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError)
"""Errors of the values, after which the connection is still good."""


class NewJob(NamedTuple):
    """A job to insert. It fails if it has not ended after `left_s`."""

    submission: Submission
    left_s: float
    callback_url: str | None = None


class JobRow(msgspec.Struct, frozen=True):
    """The status of a job and, if it has ended, its result."""

    id: str
    customer_id: str
    status: str
    output: bytes | None
    error_code: str | None
    pool: str = "default"
    tokens_used: int | None = None  # None: not counted.
    latency_ms: float | None = None
    model: str = ""
    tier: str = ""

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed")


class ListedJob(NamedTuple):
    """A job of a list. `callback_status`: of the last attempt, 0 without a response; None: none, or by an older version."""

    id: str
    status: str
    model: str
    tier: str
    created_at: datetime
    completed_at: datetime | None
    expires_at: datetime | None
    tokens_used: int | None
    error_code: str | None
    has_callback: bool
    callback_tries: int
    callback_at: datetime | None
    callback_status: int | None


class OpenJob(msgspec.Struct, frozen=True):
    """A job whose row is open. `left_s` is negative after its deadline."""

    id: str
    created_at: datetime
    tier: str
    left_s: float


class JobEnd(msgspec.Struct, frozen=True):
    """The end of a job. `output` of a failed job is the message of the backend; `customer_id` is compared if not empty."""

    id: str
    error_code: str  # "" if it completed.
    output: str = ""
    customer_id: str = ""
    tokens_used: int = 0
    output_tokens: int = 0
    finish_reason: str = "stop"


class Callback(msgspec.Struct, frozen=True):
    """A callback that is due. The result of its job is kept for another `left_s`. `secrets`: numbers of those that sign it."""

    id: str
    customer_id: str
    host: str
    url: str
    tries: int
    left_s: float
    secrets: Sequence[int]


async def insert_jobs(connection: Connection, jobs: Sequence[NewJob], pool: str) -> None:
    """Insert and commit all jobs. An existing job is not changed."""
    rows = [
        (
            job.id,
            created_at(job.id),
            job.customer_id,
            job.api_key_id,
            job.tier,
            job.model,
            job.body,
            left_s,
            job.trace_id or None,
            job.idempotency or None,
            job.fingerprint or None,
            callback_url,
            job.endpoint or None,
            not job.background,
        )
        for job, left_s, callback_url in jobs
    ]
    await connection.execute(statement("insert_jobs"), *zip(*rows, strict=True), pool)


async def find_jobs(connection: Connection, ids: Sequence[str]) -> dict[str, JobRow]:
    """The jobs that exist, by id."""
    rows = await connection.fetch(statement("find_jobs"), ids)
    return {row["id"]: JobRow(*row) for row in rows}


async def list_jobs(connection: Connection, customer_id: str, after: str, limit: int) -> list[ListedJob]:
    """The newest jobs of a customer that are kept, from behind the job `after` ("": from the first)."""
    return [ListedJob._make(row) for row in await connection.fetch(statement("list_jobs"), customer_id, after, limit)]


async def open_jobs(
    connection: Connection, pool: str, limit: int, after: tuple[datetime, str] = FIRST_PAGE
) -> list[OpenJob]:
    """The oldest open jobs of a pool after `after`, the creation time and id of the last job of the previous page."""
    return [OpenJob(*row) for row in await connection.fetch(statement("open_jobs"), pool, *after, limit)]


async def job_pools(connection: Connection) -> set[str]:
    """The pools with jobs that are open, or have to be called back, audited or deleted."""
    return {row["pool"] for row in await connection.fetch(statement("job_pools"))}


async def count_open_jobs(connection: Connection, cell: str) -> int:
    """The number of open jobs in all pools of a cell other than the default one."""
    return int(await connection.fetchval(statement("count_open_jobs"), cell))


async def open_submissions(connection: Connection, ids: Sequence[str]) -> list[Submission]:
    """Submissions that queue these jobs again. Jobs that have ended are left out.

    Limits are not checked, since the jobs were admitted before.
    """
    submissions = []
    for row in await connection.fetch(statement("open_job_bodies"), ids):
        left_ms, input_bytes = max(0, int(row["left_s"] * 1000)), 0
        with suppress(ValueError):  # The worker reports it.
            input_bytes = len(decode_payload(row["body"]).input.encode())
        submissions.append(
            Submission(
                id=row["id"],
                group=SubmissionGroup(
                    tier=row["tier"],
                    customer_id=row["customer_id"],
                    api_key_id=row["api_key_id"],
                    model=row["model"],
                    limits=NO_LIMITS,
                    endpoint=row["endpoint"] or "",
                    background=not row["interactive"],
                ),
                nonce="",  # No connection waits for it.
                input_bytes=input_bytes,
                total_ms=left_ms,
                queue_ms=left_ms,
                trace_id=row["trace_id"] or "",
                idempotency=row["idempotency"] or "",
                fingerprint=row["fingerprint"] or "",
                again=True,
                body=row["body"],
            )
        )
    return submissions


async def count_requeue(connection: Connection, ids: Sequence[str]) -> None:
    """Increment the attempts of jobs that were queued again."""
    await connection.execute(statement("count_requeue"), ids)


async def end_jobs(connection: Connection, ends: Sequence[JobEnd], kept_s: float) -> set[str]:
    """End each job that is open, and keep its result for `kept_s`. Returns the ids of the jobs that this call ended."""
    rows = [
        (
            end.id,
            end.customer_id,
            "failed" if end.error_code else "completed",
            None if end.error_code and not end.output else end.output.encode(),
            end.error_code or None,
            min(end.tokens_used, MAX_TOKENS_USED) if end.tokens_used > 0 else None,
            min(max(0, end.output_tokens), MAX_TOKENS_USED),
            end.finish_reason,
        )
        for end in ends
    ]
    return {row["id"] for row in await connection.fetch(statement("end_jobs"), *zip(*rows, strict=True), kept_s)}


async def audit_jobs(connection: Connection, pool: str, after_s: float, limit: int) -> int:
    """Write the missing audit rows of jobs that ended `after_s` ago. Returns how many were missing."""
    return int(await connection.fetchval(statement("audit_jobs"), pool, after_s, limit, HTTP_STATUSES) or 0)


async def purge_jobs(connection: Connection, pool: str, limit: int) -> None:
    """Delete jobs that are expired and audited."""
    await connection.execute(statement("purge_jobs"), pool, limit)


async def due_callbacks(
    connection: Connection,
    pool: str,
    *,
    limit: int,
    per_host: int,
    per_customer: int,
    calling: Sequence[str],
    paused: Sequence[str],
) -> list[Callback]:
    """Callbacks that are due, those with the fewest attempts first.

    At most `limit`, `per_host` and `per_customer`; without the jobs `calling` and the hosts `paused`, as `customer host`.
    """
    rows = await connection.fetch(statement("due_callbacks"), pool, limit, per_host, calling, per_customer, paused)
    return [
        Callback(
            *(row["id"], row["customer_id"], row["host"], row["callback_url"], row["callback_tries"], row["left_s"]),
            WebhookSecrets(*(row[name] for name in WebhookSecrets._fields)).valid(row["now"]),
        )
        for row in rows
    ]


async def record_callback_attempt(connection: Connection, job_id: str, retry_s: float | None, status: int) -> None:
    """Record an attempt to call back, with its HTTP status (0: no response). The next one is due in `retry_s`; None: there is none."""
    await connection.execute(statement("record_callback_attempt"), job_id, retry_s, status)


class StoreUnavailable(TierlaneError):
    """PostgreSQL did not respond in time or not at all. Whether the statement took effect is unknown."""


class JobSession:
    """A connection that runs one operation at a time.

    It is opened at the first use, and again after it was lost. While PostgreSQL is not available, operations fail at once and
    a new connection is tried at most twice a second. `name` is shown in pg_stat_activity; `clock` is monotonic seconds.
    """

    def __init__(self, database_url: str, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = database_url
        self._name = name
        self._clock = clock
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._not_before = 0.0
        self._last: tuple[float, str | None] | None = None  # When the last operation ended, and why it failed.

    @property
    def problem(self) -> str | None:
        """Why the last operation failed, as a sentence; None after one that did not.

        UNTRIED if there was none in the last seconds, or if its connection was lost since, which says nothing about the next.
        """
        if self._last is None or self._clock() - self._last[0] > NEWS_S:
            return UNTRIED
        problem = self._last[1]
        lost = self._connection is None or self._connection.is_closed()
        return UNTRIED if problem is None and lost else problem

    @property
    def available(self) -> bool:
        """Whether an operation would be tried: False for a moment after PostgreSQL was not available."""
        return self._clock() >= self._not_before

    async def run(self, operation: Callable[[Connection], Awaitable[T]]) -> T:
        """Run an operation. It is run twice if the connection turns out to be lost, so it must be repeatable.

        Raises StoreUnavailable, and what asyncpg raises for values that PostgreSQL rejects.
        """
        async with self._lock:
            if self._clock() < self._not_before:
                raise StoreUnavailable("PostgreSQL was not available a moment ago.")
            was_connected = self._connection is not None
            try:
                try:
                    found = await self._try(operation)
                except AWAY as error:
                    if not was_connected or isinstance(error, _DATA_ERRORS):
                        raise
                    found = await self._try(operation)
            except _DATA_ERRORS:
                raise
            except AWAY as error:
                now = self._clock()
                self._not_before = now + PAUSE_AFTER_FAILURE_S
                problem = f"PostgreSQL is not available: {reason(error)}."
                self._last = now, problem
                raise StoreUnavailable(problem) from error
            self._last = self._clock(), None
            return found

    async def _try(self, operation: Callable[[Connection], Awaitable[T]]) -> T:
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
            return await operation(connection)
        except _DATA_ERRORS:
            raise
        except BaseException:  # Also after a cancellation: a connection with a response under way is not used again.
            connection.terminate()
            self._connection = None
            raise

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            async with closing(connection):
                pass
