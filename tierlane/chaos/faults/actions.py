"""How each fault of the catalogue is injected: processes, PostgreSQL, Redis, the network, and full disks.

A disk that is full for some processes only: they can write no file, and get EFBIG, which is handled like ENOSPC.
"""

import asyncio
import os
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import asyncpg
import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ledger.postgres import Connection, asyncpg_dsn
from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import bounded, command_client
from tierlane.chaos.faults import hostile_client
from tierlane.chaos.faults.catalogue import KINDS, Planned
from tierlane.chaos.faults.proxy import Weather
from tierlane.chaos.faults.server_clock import told_step
from tierlane.chaos.faults.target import Doing, FaultImpossible, StackTargets


def weather(**what: bool) -> Doing:
    """A spell of this weather; its delay is drawn with the fault."""

    @asynccontextmanager
    async def held(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
        proxy = ground.proxy(fault.place, fault.index)
        delay_s = fault.parameters.get("delay_ms", 0.0) / 1000
        try:
            with proxy.held(Weather(delay_s=delay_s, **what)):
                yield f"{delay_s * 1000:.0f} ms" if delay_s else ""
        finally:
            await proxy.settle()

    return held


@asynccontextmanager
async def cut(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Every connection is reset on both sides."""
    yield f"{ground.proxy(fault.place, fault.index).cut()} connections"


TOOLS = ("setpriv", "prlimit")
TOOL_TIMEOUT_S = 2.0
GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)


class FullDisk:
    """The processes for which the disk is full. Calls take milliseconds where they are another user's."""

    def __init__(self) -> None:
        self._limited: list[psutil.Process] = []

    def fill(self, process: psutil.Process) -> None:
        """Let this one write no more. Raises FaultImpossible where the system cannot do that."""
        self._limited.append(process)
        _set_limit(process, full=True)

    def free(self) -> None:
        """Let all of them write again."""
        for process in self._limited:
            _set_limit(process, full=False)
        self._limited.clear()


@contextmanager
def full_disk() -> Iterator[FullDisk]:
    """A disk that is full while the block runs."""
    disk = FullDisk()
    try:
        yield disk
    finally:
        disk.free()


def _set_limit(process: psutil.Process, *, full: bool) -> None:
    """Move the soft limit only: the hard one stays, so that the soft one can go back to it."""
    if not hasattr(process, "rlimit"):
        raise FaultImpossible("This system cannot limit the files of another process.")
    with suppress(*GONE):
        if process.uids().real == os.geteuid():
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (0 if full else hard, hard))
        else:
            _set_limit_as_owner(process, "0:" if full else "unlimited:")


def _set_limit_as_owner(process: psutil.Process, limit: str) -> None:
    """Being root is not enough for another user's process (containers lack CAP_SYS_RESOURCE); being its user is."""
    tools = [shutil.which(name) for name in TOOLS]
    if None in tools:
        raise FaultImpossible(f"{' and '.join(TOOLS)} of util-linux are not installed.")
    become, change = (str(tool) for tool in tools)
    who = [f"--reuid={process.uids().real}", f"--regid={process.gids().real}", "--clear-groups"]
    # Not by `user=` of subprocess, which would have to copy this whole process first.
    done = subprocess.run(
        [become, *who, change, f"--pid={process.pid}", f"--fsize={limit}"],
        capture_output=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0 and process.is_running():
        raise FaultImpossible(done.stderr.decode(errors="replace").strip())


def _blow(strike: Callable[[psutil.Process], None]) -> Doing:
    @asynccontextmanager
    async def struck(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
        processes = await _processes(ground, fault)
        for process in processes:
            with suppress(psutil.Error):
                strike(process)
        yield _pids(processes)

    return struck


killed = _blow(psutil.Process.kill)
"""SIGKILL; who starts it again is the stack's affair."""
ended = _blow(psutil.Process.terminate)
"""SIGTERM: it finishes what it has, or hands it back."""


@asynccontextmanager
async def all_lost(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Every process of the place at once: every other one killed, the rest told to end."""
    everybody = range(ground.targets[fault.place])
    found = await asyncio.gather(*(asyncio.to_thread(ground.processes, fault.place, index) for index in everybody))
    for index, processes in enumerate(found):
        for process in processes:
            with suppress(psutil.Error):
                process.terminate() if index % 2 else process.kill()
    yield _pids([process for processes in found for process in processes])


@asynccontextmanager
async def stopped(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """SIGSTOP, then SIGCONT. psutil compares creation times, so a later process of that number is never hit."""
    processes = await _processes(ground, fault)
    try:
        for process in processes:
            with suppress(psutil.Error):
                process.suspend()
        yield _pids(processes)
    finally:
        for process in reversed(processes):
            with suppress(psutil.Error):
                process.resume()


@asynccontextmanager
async def gateway_without_disk(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """A gateway without Redis, which would spool its audit, and no byte more fits on its disk."""
    processes = await _processes(ground, fault)
    proxy = ground.redis_proxy_of(fault.place, fault.index)
    try:
        with full_disk() as disk, proxy.held(Weather(refuse=True)):
            for process in processes:
                disk.fill(process)
            yield _pids(processes)
    finally:
        await proxy.settle()


async def _processes(ground: StackTargets, fault: Planned) -> list[psutil.Process]:
    # Looking for children reads about every process of the machine, too long for the loop that carries the load.
    found = list(await asyncio.to_thread(ground.processes, fault.place, fault.index))
    if not found:
        raise FaultImpossible("It is down already.")
    return found


def _pids(processes: Iterable[psutil.Process]) -> str:
    pids = [str(process.pid) for process in processes]
    return f"pid {pids[0] if pids else '-'}" + (f" and {len(pids) - 1} more" if len(pids) > 1 else "")


CONNECT_TIMEOUT_S = 1.0
LOOK_S = 0.1
BACKEND = " [local] "  # The server writes into the title of a process where its client is.
TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


@asynccontextmanager
async def session(ground: StackTargets) -> AsyncIterator[Connection]:
    """A session of our own, past all proxies."""
    connection = await asyncpg.connect(asyncpg_dsn(ground.database_url), timeout=CONNECT_TIMEOUT_S, command_timeout=3)
    try:
        yield connection
    finally:
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            await connection.close(timeout=CONNECT_TIMEOUT_S)


@asynccontextmanager
async def terminated(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Every client is thrown out."""
    del fault
    async with session(ground) as connection:
        count = await connection.fetchval(TERMINATE)
    yield f"{count} backends"


@asynccontextmanager
async def locked(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Nobody else can read or write the audit."""
    del fault
    async with session(ground) as connection:
        await connection.execute("BEGIN")
        await connection.execute("SET LOCAL lock_timeout = '2s'")
        await connection.execute("LOCK TABLE requests IN ACCESS EXCLUSIVE MODE")
        yield ""


@asynccontextmanager
async def postgres_without_disk(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """No backend can write a file, the log of transactions included: each commit ends in a crash and a recovery."""
    processes = await asyncio.to_thread(ground.processes, fault.place, fault.index)
    if not processes:
        raise FaultImpossible("It is down already.")
    disk, over = FullDisk(), threading.Event()
    filling = asyncio.create_task(asyncio.to_thread(_keep_filling, processes[0], disk, over))
    try:
        yield ""
    finally:
        over.set()
        try:
            await filling
        finally:
            await asyncio.to_thread(disk.free)


def _keep_filling(server: psutil.Process, disk: FullDisk, over: threading.Event) -> None:
    """In a thread: new backends come, and all of them are new after a recovery."""
    filled: set[int] = set()
    while not over.wait(LOOK_S):
        for pid in _children(server.pid) - filled:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(BACKEND in title for title in process.cmdline()[:1]):
                    disk.fill(process)
                    filled.add(pid)


def _children(pid: int) -> set[int]:
    """Of one process, asked of the kernel: psutil reads about every process of the machine."""
    with suppress(OSError):
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return set()


PATIENCE_S = 1.0
HEAL_WITHIN_S = 15.0  # Another fault may have stopped or killed it meanwhile.
HEAL_POLL_S = 0.1
AOF_WITHIN_S = 2.0  # A file of what such a stack holds is begun in a fraction of it.


@asynccontextmanager
async def redis(ground: StackTargets) -> AsyncIterator[Redis]:
    """A client of Redis itself."""
    client = command_client(ground.redis_url)
    try:
        yield client
    finally:
        await client.aclose()


async def command(ground: StackTargets, *words: str | int) -> object:
    """Send one command. Raises RedisUnavailable when it is not answered in time; it may run later all the same."""
    async with redis(ground) as client, bounded(PATIENCE_S):
        return await client.execute_command(*words)  # type: ignore[no-untyped-call]


@asynccontextmanager
async def normal_clients_killed(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Every command connection is closed."""
    del fault
    yield f"{await command(ground, 'CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')} connections"


@asynccontextmanager
async def subscribers_killed(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Every subscriber is closed."""
    del fault
    yield f"{await command(ground, 'CLIENT', 'KILL', 'TYPE', 'pubsub')} connections"


@asynccontextmanager
async def flushed(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Everything is gone."""
    del fault
    keys = await command(ground, "DBSIZE")
    await command(ground, "FLUSHALL")
    yield f"{keys} keys"


@asynccontextmanager
async def scripts_flushed(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Redis knows no script any more."""
    del fault
    await command(ground, "SCRIPT", "FLUSH")
    yield ""


@asynccontextmanager
async def paused(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Redis takes commands and answers them when the time is over; the pause ends by itself."""
    await command(ground, "CLIENT", "PAUSE", round(fault.length_s * 1000), "ALL")
    yield ""


@asynccontextmanager
async def short_of_memory(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """The limit is just above what is used."""
    before = await _memory_limit(ground)
    spare = round(fault.parameters["spare_kib"] * 1024)
    async with redis(ground) as client, bounded(PATIENCE_S):
        used = int((await client.info("memory"))["used_memory"])
        await client.config_set("maxmemory", used + spare)
    try:
        yield f"maxmemory {used + spare}, {spare} more than used"
    finally:
        await _set(ground, "maxmemory", before)


async def _memory_limit(ground: StackTargets) -> int:
    async with redis(ground) as client, bounded(PATIENCE_S):
        return int((await client.config_get("maxmemory"))["maxmemory"] or 0)


async def _set(ground: StackTargets, name: str, value: str | int) -> None:
    """Set it, however long Redis is away; a restarted one has its own value already."""
    deadline = time.monotonic() + HEAL_WITHIN_S
    while True:
        try:
            await command(ground, "CONFIG", "SET", name, value)
            return
        except (RedisUnavailable, RedisError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(HEAL_POLL_S)


@asynccontextmanager
async def redis_without_disk(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """An append-only file that takes no byte more: every command that writes, and PING, is answered MISCONF."""
    processes = await asyncio.to_thread(ground.processes, fault.place, fault.index)
    if not processes:
        raise FaultImpossible("It is down already.")
    try:
        await command(ground, "CONFIG", "SET", "appendonly", "yes")
        await _file_begun(ground)
        with full_disk() as disk:
            disk.fill(processes[0])
            yield ""
    finally:
        await _set(ground, "appendonly", "no")


async def _file_begun(ground: StackTargets) -> None:
    """Wait until the file has what is in memory. Raises FaultImpossible where that takes too long."""
    deadline = time.monotonic() + AOF_WITHIN_S
    while time.monotonic() < deadline:
        async with redis(ground) as client, bounded(PATIENCE_S):
            state = await client.info("persistence")
        if not state["aof_rewrite_in_progress"] and not state["aof_rewrite_scheduled"]:
            return
        await asyncio.sleep(HEAL_POLL_S)
    raise FaultImpossible("It did not begin its append-only file in time.")


def clock_stepped(direction: int) -> Doing:
    """Its wall clock steps forwards (1) or backwards (-1), and back again at the end."""

    @asynccontextmanager
    async def stepped(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
        step_s = direction * round(fault.parameters["step_s"], 3)
        if ground.redis_clock.why_not:
            raise FaultImpossible(ground.redis_clock.why_not)
        ground.redis_clock.move(step_s)
        try:
            yield told_step(step_s)
        finally:
            ground.redis_clock.move(-step_s)

    return stepped


DOING: Mapping[str, Doing] = {
    **{kind.name: killed for kind in KINDS if kind.name.startswith("kill-")},
    **{kind.name: stopped for kind in KINDS if kind.name.startswith("stop-")},
    **{kind.name: ended for kind in KINDS if kind.name.startswith("term-")},
    "lose-workers": all_lost,
    "hostile-client": hostile_client.hostile,
    "spool-full": gateway_without_disk,
    "client-kill-normal": normal_clients_killed,
    "client-kill-pubsub": subscribers_killed,
    "flushall": flushed,
    "script-flush": scripts_flushed,
    "maxmemory": short_of_memory,
    "client-pause": paused,
    "redis-disk-full": redis_without_disk,
    "clock-forward": clock_stepped(1),
    "clock-backward": clock_stepped(-1),
    "delay": weather(),
    "drop-requests": weather(drop_requests=True),
    "drop-replies": weather(drop_replies=True),
    "refuse": weather(refuse=True),
    "cut": cut,
    "pg-terminate": terminated,
    "pg-lock": locked,
    "pg-disk-full": postgres_without_disk,
}
