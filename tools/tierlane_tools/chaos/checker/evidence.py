"""Evidence after the drain: audit rows, dead letters, what Redis still holds, the log of runs, open files.

Everything is read without the proxies. Evidence that cannot be read is an error, and the run has not passed. Monotonic
times are seconds as in the history; `Evidence.wall_offset_s` converts them to UNIX time.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import psutil
from redis.asyncio import Redis

from ledger.postgres import AWAY, Connection, closing, connect, reason
from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import bounded, command_client, server_url, tag_at
from scheduler.redis_client.keys import Keys
from scheduler.states import State
from tierlane_tools.chaos.faults.engine import control
from tierlane_tools.chaos.faults.target import FaultImpossible
from tierlane_tools.chaos.history import LoadCustomer, Sources


@dataclass(frozen=True)
class AuditRow:
    """One audit row of a customer of the run; None and "" for missing values. Times are UNIX milliseconds."""

    id: str
    trace: str
    customer: str
    tier: str
    status: str
    code: str
    created_ms: float
    ended_ms: float | None = None
    http_status: int | None = None
    attempts: int | None = None
    gateway_id: str = ""
    worker_id: str = ""
    mode: str = ""
    cost_ms: float = 0.0
    queue_ms: float | None = None

    @property
    def final(self) -> bool:
        """Whether the request has ended."""
        return self.status in ("completed", "failed")

    @property
    def completed(self) -> bool:
        """Whether the request has an output."""
        return self.status == "completed"


@dataclass(frozen=True)
class ModelRun:
    """The run of one input from `began` for `takes_s`; `process` is the name of its log."""

    nonce: str
    began: float
    process: str = ""
    takes_s: float = 0.05


@dataclass(frozen=True)
class Leftovers:
    """Data in Redis that should not exist when no request is open."""

    open_requests: tuple[str, ...] = ()  # Ids whose state is queued or processing.
    lengths: Mapping[str, int] = field(default_factory=dict)  # Of lists and sets that should be empty.
    leaked_keys: tuple[str, ...] = ()  # Without a TTL, and not among the permanent ones.

    @property
    def settled(self) -> bool:
        """Whether no request is open."""
        return not self.open_requests and not any(self.lengths.values())

    def __add__(self, other: "Leftovers") -> "Leftovers":
        """Of two cells."""
        return Leftovers(
            self.open_requests + other.open_requests,
            {**self.lengths, **other.lengths},
            self.leaked_keys + other.leaked_keys,
        )


@dataclass(frozen=True)
class FileCount:
    """Open files of a process before and after the run."""

    process: str
    before: int
    after: int


@dataclass(frozen=True)
class Evidence:
    """All evidence. `runs` is None where the backend writes no log; `errors`: sentences on evidence that could not be read.

    `weights`: of customers by id, 1 where there is none.
    """

    rows: tuple[AuditRow, ...] = ()
    runs: tuple[ModelRun, ...] | None = None
    dead_letters: tuple[str, ...] = ()  # Request ids.
    leftovers: Leftovers = Leftovers()
    files: tuple[FileCount, ...] = ()
    cells: int = 1
    wall_offset_s: float = 0.0
    errors: tuple[str, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)


PATIENCE_S = 20.0
CHUNK = 500
FOREVER = -1
OPEN = frozenset({State.QUEUED.value.encode(), State.PROCESSING.value.encode()})
LISTS = ("queue:", "backlog:", "inflight:", "outbox:")


async def leftovers_of_cells(redis_urls: Sequence[str]) -> Leftovers:
    """What is left in all cells; their keys have different names. Raises RedisUnavailable."""
    found = await asyncio.gather(*map(read_leftovers, redis_urls))
    return sum(found, start=Leftovers())


async def read_leftovers(redis_url: str, keys: Keys | None = None) -> Leftovers:
    """Scan every key of the pool. Raises RedisUnavailable."""
    client = command_client(await server_url(redis_url))
    try:
        async with bounded(PATIENCE_S):
            return await _scan(client, keys or Keys(tag=tag_at(client)))
    finally:
        await client.aclose()


async def _scan(client: Redis, keys: Keys) -> Leftovers:
    names = [raw.decode() async for raw in client.scan_iter(match=f"{keys.prefix}*", count=CHUNK)]
    prefix = keys.request("")
    lists = [
        keys.batch_queue,
        keys.outbox,
        *(name for name in names if name.removeprefix(keys.prefix).startswith(LISTS)),
    ]
    states = await _read(client, [name for name in names if name.startswith(prefix)], "HGET", "state")
    lives = await _read(client, [name for name in names if not keys.is_permanent(name)], "PTTL")
    lengths = await _read(client, lists, "LLEN")
    lengths[keys.leases] = await client.zcard(keys.leases)
    lengths[f"{keys.prefix}unclaimed"] = await client.hlen(f"{keys.prefix}unclaimed")
    slots = [text.split() for text in await client.hvals(f"{keys.prefix}slots")]
    lengths["Taken slots"] = sum(int(count) - int(free) for free, count in slots)
    return Leftovers(
        tuple(sorted(name.removeprefix(prefix) for name, state in states.items() if state in OPEN)),
        lengths,
        tuple(sorted(name for name, life in lives.items() if life == FOREVER)),
    )


async def _read(client: Redis, names: Sequence[str], command: str, *arguments: str) -> dict[str, Any]:
    """The replies of one command for each key."""
    found: dict[str, Any] = {}
    for first in range(0, len(names), CHUNK):
        chunk = names[first : first + CHUNK]
        async with client.pipeline(transaction=False) as pipeline:
            for name in chunk:
                pipeline.execute_command(command, name, *arguments)
            found.update(zip(chunk, await pipeline.execute(), strict=True))
    return found


STATEMENT_TIMEOUT_MS = 30_000
CONNECT_TIMEOUT_S = 5.0
FETCH_ROWS = 5000
CLOCK_S = 0.01  # Ids carry whole milliseconds.

Files = Mapping[tuple[str, int, float], int]

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
        errors += await _left_in_engine(sources.engine_url)
    return Evidence(
        rows=rows,
        runs=None if sources.runs is None else tuple(_runs(sources.runs)),
        dead_letters=dead_letters,
        leftovers=leftovers,
        files=tuple(files),
        cells=1 + len(sources.cell_urls),
        wall_offset_s=time.time() - time.monotonic(),
        errors=tuple(errors),
        weights={customer.id: customer.weight for customer in customers},
    )


async def _left_in_engine(url: str) -> list[str]:
    try:
        state = await control(url)
    except FaultImpossible as error:
        return [str(error)]
    left = state.running + state.waiting
    return [f"{left} requests run or wait in the engine that nobody waits for."] if left else []


async def _audit(sources: Sources, customers: Sequence[LoadCustomer]) -> tuple[tuple[AuditRow, ...], tuple[str, ...]]:
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
    return rows, tuple(letter[0] for letter in letters)


async def _rows(connection: Connection, since: datetime, customers: Sequence[str]) -> tuple[AuditRow, ...]:
    async with connection.transaction(readonly=True):
        cursor = connection.cursor(_ROWS, since, customers, prefetch=FETCH_ROWS)
        return tuple([_row(record) async for record in cursor])


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


def _runs(directory: Path) -> Iterator[ModelRun]:
    """All runs of the load, without incomplete last lines and warm-ups."""
    decoder = msgspec.json.Decoder(_RunLine)
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            run = decoder.decode(line)
            if run.sent is not None:
                yield ModelRun(run.nonce, run.began, path.stem, run.takes)


def open_files(processes: Iterable[tuple[str, psutil.Process]]) -> Files:
    """The number of open files of each living process, by name, pid and creation time."""
    counts = {}
    for name, process in processes:
        try:
            counts[name, process.pid, process.create_time()] = process.num_fds()
        except psutil.Error:
            continue
    return counts


def compared(before: Files, after: Files) -> list[FileCount]:
    """The open files of processes that are in both readings."""
    return [
        FileCount(f"{name} ({pid})", count, after[name, pid, created])
        for (name, pid, created), count in before.items()
        if (name, pid, created) in after
    ]
