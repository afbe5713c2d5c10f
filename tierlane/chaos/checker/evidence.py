"""Evidence after the drain: audit rows, dead letters, what Redis still holds, the log of runs, open files.

Everything is read past the proxies. What cannot be read is reported in a sentence, and the checker then proves nothing.
Monotonic times are seconds as in the history; `Evidence.wall_offset_s` turns them into UNIX time. The scan looks at
every key, which only a tool may do.
"""

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import msgspec
import psutil
from redis.asyncio import Redis

from ledger.postgres import AWAY, Connection, closing, connect, reason
from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import bounded, command_client
from scheduler.redis_client.keys import Keys
from scheduler.states import State
from tierlane.chaos.history import LoadCustomer, Sources


@dataclass(frozen=True)
class AuditRow:
    """One audit row of a customer of the run; None and "" for what it does not hold. Times are UNIX milliseconds."""

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

    @property
    def final(self) -> bool:
        """Whether it has reached its end."""
        return self.status in ("completed", "failed")

    @property
    def completed(self) -> bool:
        """Whether it has an output."""
        return self.status == "completed"


@dataclass(frozen=True)
class ModelRun:
    """A model began to run one input at `began`, which takes `takes_s`; `process` is the log that says so."""

    nonce: str
    began: float
    process: str = ""
    takes_s: float = 0.05


@dataclass(frozen=True)
class DeadLetterEvidence:
    """One row of `dead_letters`."""

    id: str
    code: str
    attempts: int


@dataclass(frozen=True)
class Leftovers:
    """What Redis still holds when nothing should be under way."""

    open_requests: tuple[str, ...] = ()  # Ids whose state is queued or processing.
    lengths: Mapping[str, int] = field(default_factory=dict)  # Of lists and sets that should be empty.
    leaked_keys: tuple[str, ...] = ()  # Without a TTL, and not among the permanent ones.

    @property
    def settled(self) -> bool:
        """Whether nothing is under way any more."""
        return not self.open_requests and not any(self.lengths.values())


@dataclass(frozen=True)
class FileCount:
    """Open files of a process that lived through the whole run."""

    process: str
    before: int
    after: int


@dataclass(frozen=True)
class Evidence:
    """Everything. `runs` is None where the backend writes none; `errors` are sentences: what could not be read."""

    rows: tuple[AuditRow, ...] = ()
    runs: tuple[ModelRun, ...] | None = None
    dead_letters: tuple[DeadLetterEvidence, ...] = ()
    leftovers: Leftovers = Leftovers()
    files: tuple[FileCount, ...] = ()
    wall_offset_s: float = 0.0
    waited_s: float = 0.0
    errors: tuple[str, ...] = ()


PATIENCE_S = 20.0
CHUNK = 500
FOREVER = -1
OPEN = frozenset({State.QUEUED.value.encode(), State.PROCESSING.value.encode()})
LISTS = ("queue:", "inflight:", "outbox:")


async def read_leftovers(redis_url: str, keys: Keys | None = None) -> Leftovers:
    """Look at every key of the pool. Raises RedisUnavailable."""
    client = command_client(redis_url)
    try:
        async with bounded(PATIENCE_S):
            return await _look(client, keys or Keys())
    finally:
        await client.aclose()


async def _look(client: Redis, keys: Keys) -> Leftovers:
    requests: list[str] = []
    lengths = {
        keys.batch_queue: await client.llen(keys.batch_queue),
        keys.outbox: await client.llen(keys.outbox),
        keys.leases: await client.zcard(keys.leases),
    }
    leaks: list[str] = []
    async for chunk in _chunks(client, keys.prefix):
        requests += await _open(client, [key for key in chunk if key.startswith(keys.request(""))], keys.request(""))
        for key in chunk:
            if key.removeprefix(keys.prefix).startswith(LISTS):
                lengths[key] = await client.llen(key)
        leaks += await _leaks(client, chunk, keys)
    return Leftovers(tuple(sorted(requests)), lengths, tuple(sorted(leaks)))


async def _chunks(client: Redis, prefix: str) -> AsyncIterator[list[str]]:
    chunk: list[str] = []
    async for raw in client.scan_iter(match=f"{prefix}*", count=CHUNK):
        chunk.append(raw.decode())
        if len(chunk) >= CHUNK:
            yield chunk
            chunk = []
    yield chunk


async def _open(client: Redis, keys: list[str], prefix: str) -> list[str]:
    async with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.hget(key, "state")
        states = await pipeline.execute()
    return [key.removeprefix(prefix) for key, state in zip(keys, states, strict=True) if state in OPEN]


async def _leaks(client: Redis, chunk: list[str], keys: Keys) -> list[str]:
    names = [key for key in chunk if not keys.is_permanent(key)]
    async with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.pttl(name)
        lives = await pipeline.execute()
    return [name for name, life in zip(names, lives, strict=True) if life == FOREVER]


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
    sources: Sources, customers: Sequence[LoadCustomer], files: Sequence[FileCount] = (), unfinished: str = ""
) -> Evidence:
    """Read everything once; call it when the stack is idle. `files` come from `compared`.

    `unfinished`: in one sentence what the stack had not finished when it should have; it then proves nothing.
    """
    began, errors = time.monotonic(), [unfinished] if unfinished else []
    rows: tuple[AuditRow, ...] = ()
    dead_letters: tuple[DeadLetterEvidence, ...] = ()
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


async def _audit(
    sources: Sources, customers: Sequence[LoadCustomer]
) -> tuple[tuple[AuditRow, ...], tuple[DeadLetterEvidence, ...]]:
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
    return rows, tuple(DeadLetterEvidence(*letter) for letter in letters)


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
    )


def _runs(directory: Path) -> Iterator[ModelRun]:
    """All runs of the load; a last line that was cut is no run that anybody saw, and warm-ups carry no time."""
    decoder = msgspec.json.Decoder(_RunLine)
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            run = decoder.decode(line)
            if run.sent is not None:
                yield ModelRun(run.nonce, run.began, path.stem, run.takes)


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
