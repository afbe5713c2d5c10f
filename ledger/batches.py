"""Batches of /v1/batches in PostgreSQL: create, find, list, cancel; leases of the gateways that run them; their lines.

Each function is one statement that can be repeated, and raises what asyncpg raises. A line ends once, whichever gateway
writes its end: counts and files follow from the lines that a statement ended.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, Self

import asyncpg
import msgspec

from ledger.jobs import HTTP_STATUSES
from ledger.postgres import Connection, statement

PURGED_BATCHES, PURGED_LINES = 16, 2000
AUDITED_LINES = 10_000
AUDITED_BATCHES = 20
"""In one pass, of which there is one in five seconds."""


class NewBatch(NamedTuple):
    """A batch to insert. `metadata` is JSON; `output_kept_s`: seconds that its results are kept, None: the default.

    `pool`: that of the gateway. `idempotency`, `fingerprint`: hashes of the Idempotency-Key and the body, None without a key.
    """

    id: str
    customer_id: str
    api_key_id: str
    endpoint: str
    input_file_id: str
    metadata: str | None
    output_kept_s: int | None
    pool: str
    idempotency: str | None
    fingerprint: str | None


class BatchRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A batch. `left_s`: seconds until its open lines expire; `customer`: the name. The other fields are columns."""

    id: str
    customer_id: str
    customer: str
    api_key_id: str
    endpoint: str
    input_file_id: str
    metadata: str | None
    status: str
    total: int
    completed: int
    failed: int
    errors: str | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: datetime
    deadline: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None
    owner: str | None
    left_s: float

    @classmethod
    def of(cls, row: asyncpg.Record) -> Self:
        """From a row."""
        values = {name: row[name] for name in cls.__struct_fields__}
        return cls(**values | {"customer_id": str(row["customer_id"])})


class OpenBatches(msgspec.Struct, frozen=True, gc=False):
    """The numbers of open batches and of their lines that have not ended."""

    batches: int
    lines: int


class KnownLine(msgspec.Struct, frozen=True, gc=False):
    """A line that was submitted or has ended."""

    number: int
    request_id: str
    ended: bool


class LineEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of a line: its line of the output file, or of the error file if it failed."""

    number: int
    request_id: str
    output: bytes
    failed: bool


async def insert_batch(
    connection: Connection, batch: NewBatch, left_s: float, max_open: int
) -> tuple[str, str | None] | None:
    """Insert a batch. Returns its id and fingerprint, or those of an earlier batch with its Idempotency-Key.

    None if its customer has `max_open` open batches, or if another statement inserts the same key.
    """
    row = await connection.fetchrow(statement("insert_batch"), *batch, left_s, max_open)
    return (row["id"], row["fingerprint"]) if row else None


async def find_batch(connection: Connection, batch_id: str, customer_id: str | None = None) -> BatchRow | None:
    """The batch, if it is the customer's."""
    row = await connection.fetchrow(statement("find_batch"), batch_id, customer_id)
    return BatchRow.of(row) if row else None


async def list_batches(
    connection: Connection,
    customer_id: str | None,
    *,
    after: str = "",
    limit: int,
    open_only: bool = False,
    customer: str | None = None,
) -> list[BatchRow]:
    """A page of batches, the newest first, from behind the batch `after` ("": from the first).

    `customer`: only of the one with this name or id.
    """
    rows = await connection.fetch(statement("list_batches"), customer_id, after, limit, open_only, customer)
    return [BatchRow.of(row) for row in rows]


async def cancel_batch(connection: Connection, batch_id: str, customer_id: str | None = None) -> bool:
    """Start to cancel the batch. Returns False if it is not open."""
    return await connection.fetchval(statement("cancel_batch"), batch_id, customer_id) is not None


async def claim_batches(
    connection: Connection, owner: str, lease_s: float, limit: int, *, of_customer: int, pool: str | None
) -> list[BatchRow]:
    """Open batches that no gateway runs, which `owner` runs from now on; at most `of_customer` of one customer in all.

    `pool`: only those that a gateway of this pool created; None: all.
    """
    rows = await connection.fetch(statement("claim_batches"), owner, lease_s, limit, of_customer, pool)
    return [BatchRow.of(row) for row in rows]


async def renew_batches(connection: Connection, owner: str, lease_s: float, ids: Sequence[str]) -> dict[str, str]:
    """Renew the leases of `owner`. Returns the status of each batch that it still owns."""
    rows = await connection.fetch(statement("renew_batches"), owner, lease_s, ids)
    return {row["id"]: row["status"] for row in rows}


async def release_batches(connection: Connection, owner: str) -> None:
    """End all leases of `owner`, so that another gateway can take over at once."""
    await connection.execute(statement("release_batches"), owner)


async def count_open_batches(connection: Connection) -> OpenBatches:
    """The open batches of all customers."""
    return OpenBatches(*await connection.fetchrow(statement("count_open_batches")) or (0, 0))


async def start_batch(connection: Connection, batch_id: str, total: int) -> str | None:
    """The input file of the batch is valid and has `total` lines. Returns its status, None if it is not open."""
    status: str | None = await connection.fetchval(statement("start_batch"), batch_id, total)
    return status


async def fail_batch(connection: Connection, batch_id: str, errors: str, kept_s: float) -> None:
    """The input file of the batch has faults: `errors`, as JSON."""
    await connection.execute(statement("fail_batch"), batch_id, errors, kept_s)


async def known_lines(connection: Connection, batch_id: str, first: int, last: int) -> dict[int, KnownLine]:
    """The lines of this range that were submitted or have ended, by number."""
    rows = await connection.fetch(statement("known_lines"), batch_id, first, last)
    return {row["number"]: KnownLine(*row) for row in rows}


async def begin_lines(
    connection: Connection, batch_id: str, requests: Sequence[tuple[int, str, str]]
) -> dict[int, str]:
    """Store the request ids of lines before they are submitted: number, the id that is replaced ("": none), the new id.

    Returns the ids by number: another owner's, if it was there first. Lines that have ended, or got another id, are missing.
    """
    rows = await connection.fetch(statement("begin_lines"), batch_id, *zip(*requests, strict=True))
    return {row["number"]: row["request_id"] for row in rows}


async def end_lines(connection: Connection, batch_id: str, ends: Sequence[LineEnd]) -> str | None:
    """End each line that has not ended. Returns the status of the batch, None if it was deleted."""
    rows = [(end.number, end.request_id, end.output, end.failed) for end in ends]
    status: str | None = await connection.fetchval(statement("end_lines"), batch_id, *zip(*rows, strict=True))
    return status


async def finalize_batch(connection: Connection, batch_id: str) -> None:
    """All lines of the batch have ended."""
    await connection.execute(statement("finalize_batch"), batch_id)


async def end_batch(
    connection: Connection, batch_id: str, status: str, file_ids: tuple[str, str], kept_s: float
) -> str | None:
    """End the batch with its output and error file. Returns its status, `cancelled` if it was cancelled; None if it has ended."""
    found: str | None = await connection.fetchval(statement("end_batch"), batch_id, status, *file_ids, kept_s)
    return found


async def audit_lines(connection: Connection, after_s: float) -> int:
    """Write the missing audit rows of lines of batches that ended `after_s` ago. Returns how many were missing."""
    missing = 0
    for _ in range(AUDITED_BATCHES):
        batches, written = await connection.fetchrow(
            statement("audit_lines"), after_s, AUDITED_LINES, HTTP_STATUSES
        ) or (0, 0)
        missing += written
        if not batches:
            break
    return missing


async def purge_batches(connection: Connection) -> None:
    """Delete expired batches, in parts."""
    await connection.execute(statement("purge_batches"), PURGED_BATCHES, PURGED_LINES)
