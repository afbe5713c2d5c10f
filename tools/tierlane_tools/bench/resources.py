"""Resources of a run: CPU and memory by role, batch fill, padding, the stack's own file, and the cost of an echo.

CPU and memory are read from the processes themselves, off the event loop; processes that were replaced cannot be read
any more and are named instead. Batch fill and GPU use come from audit rows, padding from the gateway's health. The cost
of a request depends on the machine, its load and the number of connections, so the plan's load runs on bare echo
processes just before the run.
"""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from secrets import token_hex

import aiohttp
import msgspec
import psutil

from ledger.postgres import AWAY, Connection
from tierlane_local.up.data_dir import held_port
from tierlane_tools.bench.load import BenchLoad, Phase, Traffic
from tierlane_tools.bench.plan import TAG_CHARACTERS, BenchPlan, Inputs, OutputCheck, TargetAddress, Verify
from tierlane_tools.bench.statistics import TierStatistics, new_tallies
from tierlane_tools.bench.verification import audit_connection

# The members of a batch share its size, its run time and its worker. A batch that lost members to an earlier end, a
# cancel for instance, still has them in batch_size.
_BATCHES = """
SELECT max(batch_size), max(gpu_ms), max(worker_id), count(*)
FROM requests
WHERE created_at BETWEEN $1 AND $2 AND api_key_id = ANY($3) AND completed_at >= $4 AND completed_at < $5
  AND batch_id IS NOT NULL AND gpu_ms IS NOT NULL
GROUP BY batch_id
"""
_LARGEST = "SELECT max(max_batch_size) FROM models WHERE enabled AND ($1 = '' OR name = $1)"


@dataclass(frozen=True)
class Ran:
    """One batch that ran to its end."""

    size: int
    gpu_ms: float
    worker_id: str
    members: int


@dataclass(frozen=True)
class BatchUse:
    """The batches that ended in the window. Shares of 0..1; None where what they are a share of is not known."""

    batches: int
    requests: int
    mean_size: float | None
    max_batch_size: int | None
    fill: float | None
    """Mean size over the largest that the model may have."""
    mean_gpu_ms: float | None
    workers: int
    gpu_busy: float | None
    """GPU time over workers times window."""
    sizes: dict[int, int]


@dataclass(frozen=True)
class MeasuredRows:
    """Which rows: made in the run by these keys, ended in the window that is measured."""

    made_from: datetime
    made_to: datetime
    api_key_ids: tuple[str, ...]
    ended_from: datetime
    ended_to: datetime


async def read_batches(database_url: str, span: MeasuredRows, model: str, workers: int) -> BatchUse | None:
    """Read the rows; None when the database is away. `workers`: how many there are, 0 for those that were seen."""
    try:
        async with audit_connection(database_url) as connection:
            ran = await _ran(connection, span)
            largest = await connection.fetchval(_LARGEST, model)
    except (*AWAY, ValueError):
        return None
    return batch_use(ran, largest, workers, (span.ended_to - span.ended_from).total_seconds())


async def _ran(connection: Connection, span: MeasuredRows) -> list[Ran]:
    keys = list(span.api_key_ids)
    rows = await connection.fetch(_BATCHES, span.made_from, span.made_to, keys, span.ended_from, span.ended_to)
    return [Ran(row[0] or row[3], row[1], row[2] or "", row[3]) for row in rows]


def batch_use(ran: list[Ran], largest: int | None, workers: int, window_s: float) -> BatchUse:
    """Sum up batches; what ran in part outside of the window counts whole at one end and not at all at the other."""
    workers = workers or len({batch.worker_id for batch in ran})
    gpu_ms = sum(batch.gpu_ms for batch in ran)
    mean_size = sum(batch.size for batch in ran) / len(ran) if ran else None
    return BatchUse(
        batches=len(ran),
        requests=sum(batch.members for batch in ran),
        mean_size=mean_size,
        max_batch_size=largest,
        fill=mean_size / largest if mean_size and largest else None,
        mean_gpu_ms=gpu_ms / len(ran) if ran else None,
        workers=workers,
        gpu_busy=gpu_ms / 1000 / (workers * window_s) if workers and window_s else None,
        sizes=dict(sorted(Counter(batch.size for batch in ran).items())),
    )


TIMEOUT_S = 2.0


class _Health(msgspec.Struct):
    padding_waste: float


async def read_padding(http_url: str, service_token: str) -> float | None:
    """The share (0..1) over all healthy workers' late batches; None where the gateway does not tell."""
    headers = {"Authorization": f"Bearer {service_token}"}
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session,
            session.get(f"{http_url}/internal/health") as answer,
        ):
            return msgspec.json.decode(await answer.read(), type=_Health).padding_waste
    except (
        aiohttp.ClientError,
        TimeoutError,
        msgspec.MsgspecError,
    ):  # The last of them: a refusal, or another document.
        return None


class StackFileError(Exception):
    """The file cannot be used; the message is one sentence."""


class ProcessInfo(msgspec.Struct, frozen=True):
    """One process. `role` is gateway, scheduler, worker, model, redis or postgres."""

    role: str
    name: str
    pid: int


class StackInfo(msgspec.Struct, frozen=True):
    """The file. For a system that `tierlane up` did not start, one with `keys` alone will do."""

    keys: dict[str, str]
    http_url: str = ""
    database_url: str = ""
    service_token: str = ""
    processes: tuple[ProcessInfo, ...] = ()


def read_stack(path: Path) -> StackInfo:
    """Read the file. Raises StackError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StackInfo)
    except FileNotFoundError:
        raise StackFileError(f"There is no {path}; start `tierlane up` first, or name its file with --stack.") from None
    except OSError as error:
        raise StackFileError(f"Cannot read {path}: {error.strerror}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StackFileError(f"{path} is not a stack file: {error}.") from None


def keys_for(stack: StackInfo, tiers: Sequence[str]) -> list[list[str]]:
    """The keys of these tiers, in their order: one each. Raises StackError, which names the tier without one."""
    return _of_tiers(tiers, {tier: [key] for tier, key in stack.keys.items() if key}, "The stack file")


def read_keys(path: Path, tiers: Sequence[str]) -> list[list[str]]:
    """The keys of these tiers, in their order, from lines `tier,key`. Raises StackError."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StackFileError(f"Cannot read the keys in {path}: {error}.") from None
    keys: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        tier, comma, key = (piece.strip() for piece in line.partition(","))
        if line.strip() and not (tier and comma and key):
            raise StackFileError(f"{path}, line {number}: must be TIER,KEY.")  # Without the line, which may hold a key.
        keys.setdefault(tier, []).append(key)
    return _of_tiers(tiers, keys, str(path))


def _of_tiers(tiers: Sequence[str], keys: dict[str, list[str]], where: str) -> list[list[str]]:
    for tier in tiers:
        if not keys.get(tier):
            names = ", ".join(name for name in keys if name)
            raise StackFileError(f"{where} has no key for the tier {tier!r}; it has {names or 'none'}.")
    return [keys[tier] for tier in tiers]


WITH_CHILDREN = frozenset({"postgres", "redis"})
"""Roles part of whose work is done in child processes that the stack file does not list: Redis rewrites its append-only
file in one."""

MEMORY_OF_CHILDREN = frozenset({"postgres"})
"""Those whose children hold memory of their own; Redis' child is a copy that shares its parent's pages."""


@dataclass(frozen=True)
class ProcessCpu:
    """One process at one moment. `started` tells it from a later one with the same pid."""

    role: str
    name: str
    pid: int
    started: float
    seconds: float
    rss: int = 0
    """Bytes in memory."""


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds by role between two readings, and the processes for which that is not the whole truth."""

    by_role: dict[str, float] = field(default_factory=dict)
    incomplete: tuple[str, ...] = ()


def read_cpu(processes: Iterable[ProcessInfo]) -> list[ProcessCpu]:
    """The CPU time of each process since it began, user and system; the gone and the forbidden are left out."""
    readings = []
    for info in processes:
        with suppress(psutil.Error):
            process = psutil.Process(info.pid)
            seconds = _tree_seconds(process) if info.role in WITH_CHILDREN else _seconds(process)
            rss = process.memory_info().rss
            if info.role in MEMORY_OF_CHILDREN:
                rss += _own_memory_of_children(process)
            readings.append(ProcessCpu(info.role, info.name, info.pid, process.create_time(), seconds, rss))
    return readings


def cpu_between(before: Iterable[ProcessCpu], after: Iterable[ProcessCpu]) -> CpuUse:
    """What was used from one reading to the next. A process that is new counts from its own beginning."""
    earlier = {reading.name: reading for reading in before}
    later = {reading.name: reading for reading in after}
    by_role: defaultdict[str, float] = defaultdict(float)
    incomplete = {name for name in earlier if name not in later}
    for name, reading in later.items():
        base = earlier.get(name)
        same = base is not None and (base.pid, base.started) == (reading.pid, reading.started)
        if not same:
            incomplete.add(name)
        # Children that were reaped in between may leave a sum a tick behind.
        by_role[reading.role] += max(0.0, reading.seconds - (base.seconds if base and same else 0.0))
    return CpuUse(dict(by_role), tuple(sorted(incomplete)))


def rss_by_role(readings: Iterable[ProcessCpu]) -> dict[str, int]:
    """Bytes in memory."""
    by_role: defaultdict[str, int] = defaultdict(int)
    for reading in readings:
        by_role[reading.role] += reading.rss
    return dict(by_role)


def _own_memory_of_children(process: psutil.Process) -> int:
    """Without what is shared, or each connection would count the buffers of the database again."""
    total = 0
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            memory = child.memory_info()
            total += memory.rss - getattr(memory, "shared", 0)
    return total


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _tree_seconds(process: psutil.Process) -> float:
    """One process, its living descendants, and those that it has reaped (where the system counts them)."""
    total = _with_reaped(process)
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            total += _with_reaped(child)
    return total


def _with_reaped(process: psutil.Process) -> float:
    times = process.cpu_times()
    reaped = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return float(times.user + times.system + reaped)


HOST = "127.0.0.1"
WARMUP_S = 1.0
MOST_S = 5.0
START_S = 20.0


@dataclass(frozen=True)
class EchoResult:
    """What the echo did. CPU in microseconds a request."""

    processes: int
    rate: float
    cpu_us: float
    median_ms: float | None
    p99_ms: float | None
    failed: int


def echo_seconds(plan: BenchPlan) -> float:
    """How long `measure_echo` takes, about."""
    return WARMUP_S + min(MOST_S, plan.duration)


async def measure_echo(plan: BenchPlan, keys: Sequence[Sequence[str]], processes: int) -> EchoResult | None:
    """Start, load and stop so many echo processes; None when they do not start."""
    async with AsyncExitStack() as stack:
        port = stack.enter_context(held_port(HOST, 0))
        try:
            async with asyncio.timeout(START_S):
                started = [await stack.enter_async_context(_started(port)) for _ in range(processes)]
        except TimeoutError:
            return None
        infos = [ProcessInfo("echo", f"echo-{number}", process.pid) for number, process in enumerate(started)]
        return await _measured(plan, TargetAddress(HOST, port, f"{HOST}:{port}", "/v1/inference"), keys, infos)


@asynccontextmanager
async def _started(port: int) -> AsyncIterator[Process]:
    command = (sys.executable, "-m", "tierlane_tools.bench.echo_server", str(port))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        if process.stdout:
            await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _measured(
    plan: BenchPlan, address: TargetAddress, keys: Sequence[Sequence[str]], infos: Sequence[ProcessInfo]
) -> EchoResult:
    inputs = Inputs(token_hex(TAG_CHARACTERS // 2), plan.filler)
    seconds = min(MOST_S, plan.duration)
    phases = [Phase(end_s, new_tallies(plan.mix.tiers, {})) for end_s in (WARMUP_S, WARMUP_S + seconds)]
    load = Traffic(plan, keys, inputs, OutputCheck(Verify.OFF, inputs)).load(address, phases)
    load.begin()
    finished = asyncio.create_task(load.finish(), name="echo")
    try:
        await _until(load, WARMUP_S)
        before, answers, began_s = await asyncio.to_thread(read_cpu, infos), load.answers, time.monotonic()
        await _until(load, WARMUP_S + seconds)
        answers, window_s = load.answers - answers, time.monotonic() - began_s
        used = cpu_between(before, await asyncio.to_thread(read_cpu, infos))
    finally:
        load.stop()
        await finished
    return _result(len(infos), answers, window_s, sum(used.by_role.values()), phases[1].tallies)


async def _until(load: BenchLoad, at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - load.elapsed_s()))


def _result(
    processes: int, answers: int, window_s: float, cpu_s: float, tallies: Sequence[TierStatistics]
) -> EchoResult:
    whole = TierStatistics.merged("echo", tallies)
    quantiles = [whole.latency.quantile(share) for share in (0.5, 0.99)]
    median_ms, p99_ms = (None if value is None else round(value * 1000, 4) for value in quantiles)
    cpu_us = cpu_s * 1e6 / answers if answers else 0.0
    return EchoResult(processes, answers / window_s, round(cpu_us, 2), median_ms, p99_ms, whole.failures)
