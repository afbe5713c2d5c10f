"""The collection of evidence after the drain: audit rows, dead letters, the log of runs, and what Redis still holds.

Everything is read without the proxies. Evidence that cannot be read is an error, and the run has not passed.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

import asyncpg
import msgspec

from ledger.postgres import AWAY, closing, connect, reason
from scheduler.errors import RedisUnavailable
from tierlane_tools.chaos.checker.evidence import AuditRow, Evidence, ModelRun
from tierlane_tools.chaos.checker.leftovers import Leftovers, leftovers_of_cells
from tierlane_tools.chaos.checker.open_files import FileCount
from tierlane_tools.chaos.faults.engine import control
from tierlane_tools.chaos.faults.target import FaultImpossible
from tierlane_tools.chaos.history import LoadCustomer, Sources

STATEMENT_TIMEOUT_MS = 30_000
CONNECT_TIMEOUT_S = 5.0
FETCH_ROWS = 5000
CLOCK_S = 0.01  # Ids carry whole milliseconds.

# Rows without a customer have only an end. They may belong to any run, and should not exist.
_ROWS = """
SELECT id, trace_id, customer_id::text, tier, status, error_code, created_at, completed_at, http_status, attempts,
       gateway_id, worker_id, mode, cost_ms, queue_ms
FROM requests WHERE created_at >= $1 AND (customer_id = ANY($2::uuid[]) OR customer_id IS NULL)
"""
_DEAD_LETTERS = "SELECT request_id FROM dead_letters WHERE dead_at >= $1"


class _RunLine(msgspec.Struct):
    nonce: str
    began: float
    sent: float | None = None
    takes: float = 0.05


async def collect(
    sources: Sources, customers: Sequence[LoadCustomer], files: Sequence[FileCount] = (), unfinished: str = ""
) -> Evidence:
    """Read all evidence of an idle stack. `files` come from `compared`; `unfinished`: work that the stack has not finished."""
    errors = [unfinished] if unfinished else []
    rows: tuple[AuditRow, ...] = ()
    dead_letters: tuple[str, ...] = ()  # Request ids.
    leftovers = Leftovers()
    try:
        rows, dead_letters = await _audit(sources, customers)
    except (*AWAY, ValueError) as error:
        errors.append(f"The audit cannot be read: {reason(error)}.")
    try:
        leftovers = await leftovers_of_cells((sources.redis_url, *sources.cell_urls))
    except RedisUnavailable as error:
        errors.append(f"Redis cannot be read: {reason(error)}.")
    if sources.engine_url:
        try:
            state = await control(sources.engine_url)
            if left := state.running + state.waiting:
                errors.append(f"{left} requests run or wait in the engine that nobody waits for.")
        except FaultImpossible as error:
            errors.append(str(error))
    runs: list[ModelRun] = []
    if sources.runs is not None:
        decoder = msgspec.json.Decoder(_RunLine)
        for path in sorted(sources.runs.glob("*.jsonl")):
            for line in path.read_bytes().split(b"\n")[:-1]:  # The last line may be incomplete.
                run = decoder.decode(line)
                if run.sent is not None:  # Warm-ups have no time of sending.
                    runs.append(ModelRun(run.nonce, run.began, path.stem, run.takes))
    return Evidence(
        rows=rows,
        runs=None if sources.runs is None else tuple(runs),
        dead_letters=dead_letters,
        leftovers=leftovers,
        files=tuple(files),
        cells=1 + len(sources.cell_urls),
        wall_offset_s=time.time() - time.monotonic(),
        errors=tuple(errors),
        weights={customer.id: customer.weight for customer in customers},
    )


async def _audit(sources: Sources, customers: Sequence[LoadCustomer]) -> tuple[tuple[AuditRow, ...], tuple[str, ...]]:
    since = datetime.fromtimestamp(sources.started_at - CLOCK_S, tz=UTC)
    connection = await connect(
        sources.database_url,
        name="tierlane chaos",
        connect_timeout_s=CONNECT_TIMEOUT_S,
        statement_timeout_ms=STATEMENT_TIMEOUT_MS,
    )
    async with closing(connection):
        async with connection.transaction(readonly=True):
            cursor = connection.cursor(_ROWS, since, [customer.id for customer in customers], prefetch=FETCH_ROWS)
            rows = tuple([_row(record) async for record in cursor])
        letters = await connection.fetch(_DEAD_LETTERS, since)
    return rows, tuple(letter[0] for letter in letters)


def _row(record: asyncpg.Record) -> AuditRow:
    ended = record["completed_at"]
    return AuditRow(
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
        cost_ms=record["cost_ms"] or 0.0,
        queue_ms=record["queue_ms"],
    )
