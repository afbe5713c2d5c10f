"""Collecting what is left when all is quiet: audit rows, dead letters, what Redis still holds, the log of runs, files.

Everything is read past the proxies. What cannot be read is told in a sentence, and the checker then proves nothing.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import msgspec
import psutil

from ledger.postgres import AWAY, Connection, closing, connect, reason
from scheduler.errors import RedisUnavailable
from tierlane.chaos.leftovers import read_leftovers
from tierlane.chaos.plan import Customer, Sources
from tierlane.chaos.proof import DeadLetter, Evidence, FileCount, Leftovers, Row, Run

STATEMENT_TIMEOUT_MS = 30_000
CONNECT_TIMEOUT_S = 5.0
FETCH_ROWS = 5000
CLOCK_S = 0.01  # Ids carry whole milliseconds.

Files = Mapping[tuple[str, int, float], int]

# Rows without a customer are those of which only the end was noted; they may be anybody's, and should not be there.
_ROWS = """
SELECT id, trace_id, customer_id::text, tier, status, error_code, created_at, completed_at, http_status, attempts,
       gateway_id, worker_id, mode
FROM requests WHERE created_at >= $1 AND (customer_id = ANY($2::uuid[]) OR customer_id IS NULL)
"""
_DEAD_LETTERS = "SELECT request_id, error_code, attempts FROM dead_letters WHERE dead_at >= $1"


class _RunLine(msgspec.Struct):
    nonce: str
    began: float
    sent: float | None = None
    takes: float = 0.05


async def collect(
    sources: Sources, customers: Sequence[Customer], files: Sequence[FileCount] = (), unfinished: str = ""
) -> Evidence:
    """Read everything once; call it when the stack is idle. `files` come from `compared`.

    `unfinished`: in one sentence what the stack had not finished when it should have; it then proves nothing.
    """
    began, errors = time.monotonic(), [unfinished] if unfinished else []
    rows: tuple[Row, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    leftovers = Leftovers()
    try:
        rows, dead_letters = await _audit(sources, customers)
    except (*AWAY, ValueError) as error:
        errors.append(f"The audit cannot be read: {reason(error)}.")
    try:
        leftovers = await read_leftovers(sources.redis_url)
    except RedisUnavailable as error:
        errors.append(f"Redis cannot be read: {reason(error)}.")
    return Evidence(
        rows=rows,
        runs=None if sources.runs is None else tuple(_runs(sources.runs)),
        dead_letters=dead_letters,
        leftovers=leftovers,
        files=tuple(files),
        wall_offset_s=time.time() - time.monotonic(),
        waited_s=time.monotonic() - began,
        errors=tuple(errors),
    )


async def _audit(sources: Sources, customers: Sequence[Customer]) -> tuple[tuple[Row, ...], tuple[DeadLetter, ...]]:
    since = datetime.fromtimestamp(sources.started_at - CLOCK_S, tz=UTC)
    connection = await connect(
        sources.database_url,
        name="tierlane chaos",
        connect_timeout_s=CONNECT_TIMEOUT_S,
        statement_timeout_ms=STATEMENT_TIMEOUT_MS,
    )
    async with closing(connection):
        rows = await _rows(connection, since, [customer.id for customer in customers])
        letters = await connection.fetch(_DEAD_LETTERS, since)
    return rows, tuple(DeadLetter(*letter) for letter in letters)


async def _rows(connection: Connection, since: datetime, customers: Sequence[str]) -> tuple[Row, ...]:
    async with connection.transaction(readonly=True):
        cursor = connection.cursor(_ROWS, since, customers, prefetch=FETCH_ROWS)
        return tuple([_row(record) async for record in cursor])


def _row(record: asyncpg.Record) -> Row:
    ended = record["completed_at"]
    return Row(
        id=record["id"],
        trace=record["trace_id"] or "",
        customer=record["customer_id"] or "",
        tier=record["tier"] or "",
        status=record["status"],
        code=record["error_code"] or "",
        created_ms=record["created_at"].timestamp() * 1000,
        ended_ms=None if ended is None else ended.timestamp() * 1000,
        http_status=record["http_status"],
        attempts=record["attempts"],
        gateway_id=record["gateway_id"] or "",
        worker_id=record["worker_id"] or "",
        mode=record["mode"] or "",
    )


def _runs(directory: Path) -> Iterator[Run]:
    """All runs of the load; a last line that was cut is no run that anybody saw, and warm-ups carry no time."""
    decoder = msgspec.json.Decoder(_RunLine)
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            run = decoder.decode(line)
            if run.sent is not None:
                yield Run(run.nonce, run.began, path.stem, run.takes)


def open_files(processes: Iterable[tuple[str, psutil.Process]]) -> Files:
    """How many files each process has open, by name, pid and time of creation; those that are gone are left out."""
    counts = {}
    for name, process in processes:
        try:
            counts[name, process.pid, process.create_time()] = process.num_fds()
        except psutil.Error:
            continue
    return counts


def compared(before: Files, after: Files) -> list[FileCount]:
    """Of the processes that lived from one reading to the other."""
    return [FileCount(f"{who[0]} ({who[1]})", count, after[who]) for who, count in before.items() if who in after]
