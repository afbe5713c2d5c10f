"""The injection of each fault of the catalogue: processes, PostgreSQL, Redis, the network, and full disks.

A full disk is simulated by a file size limit of single processes: they get EFBIG, which is handled like ENOSPC.
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
from tierlane_tools.chaos.faults import cluster, engine, hostile_client
from tierlane_tools.chaos.faults.catalogue import KINDS, Planned
from tierlane_tools.chaos.faults.proxy import NetworkFault
from tierlane_tools.chaos.faults.server_clock import step_text
from tierlane_tools.chaos.faults.target import FaultAction, FaultImpossible, StackTargets


def network(**effects: bool) -> FaultAction:
    """A network fault; its delay is a parameter of the planned fault."""

    @asynccontextmanager
    async def injected(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
        proxy = targets.proxy(fault.place, fault.index)
        delay_s = fault.parameters.get("delay_ms", 0.0) / 1000
        try:
            with proxy.inject(NetworkFault(delay_s=delay_s, **effects)):
                yield f"{delay_s * 1000:.0f} ms" if delay_s else ""
        finally:
            await proxy.reopen()

    return injected


@asynccontextmanager
async def cut(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Reset every connection on both sides."""
    yield f"{targets.proxy(fault.place, fault.index).cut()} connections"


TOOLS = ("setpriv", "prlimit")
TOOL_TIMEOUT_S = 2.0
GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)


class FullDisk:
    """The processes for which the disk is full. Calls take milliseconds for processes of another user."""

    def __init__(self) -> None:
        self._limited: list[psutil.Process] = []

    def fill(self, process: psutil.Process) -> None:
        """Make writes of a process fail. Raises FaultImpossible where the system cannot do that."""
        self._limited.append(process)
        _set_limit(process, full=True)

    def free(self) -> None:
        """Make writes of all processes possible again."""
        for process in self._limited:
            _set_limit(process, full=False)
        self._limited.clear()


@contextmanager
def full_disk() -> Iterator[FullDisk]:
    """A full disk until the end of the block."""
    disk = FullDisk()
    try:
        yield disk
    finally:
        disk.free()


def _set_limit(process: psutil.Process, *, full: bool) -> None:
    """Change the soft limit only, so that it can be restored to the hard one."""
    if not hasattr(process, "rlimit"):
        raise FaultImpossible("This system cannot limit the files of another process.")
    with suppress(*GONE):
        if process.uids().real == os.geteuid():
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (0 if full else hard, hard))
        else:
            _set_limit_as_owner(process, "0:" if full else "unlimited:")


def _set_limit_as_owner(process: psutil.Process, limit: str) -> None:
    """Set the limit as the user of the process: root may lack CAP_SYS_RESOURCE in containers."""
    tools = [shutil.which(name) for name in TOOLS]
    if None in tools:
        raise FaultImpossible(f"{' and '.join(TOOLS)} of util-linux are not installed.")
    become, change = (str(tool) for tool in tools)
    user = [f"--reuid={process.uids().real}", f"--regid={process.gids().real}", "--clear-groups"]
    # Not by `user=` of subprocess, which would fork this large process.
    done = subprocess.run(
        [become, *user, change, f"--pid={process.pid}", f"--fsize={limit}"],
        capture_output=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0 and process.is_running():
        raise FaultImpossible(done.stderr.decode(errors="replace").strip())


def _signal(send: Callable[[psutil.Process], None]) -> FaultAction:
    @asynccontextmanager
    async def signalled(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
        processes = await _processes(targets, fault)
        for process in processes:
            with suppress(psutil.Error):
                send(process)
        yield _pids(processes)

    return signalled


killed = _signal(psutil.Process.kill)
"""SIGKILL; the stack restarts the process."""
ended = _signal(psutil.Process.terminate)
"""SIGTERM: the process finishes its work or returns it."""


@asynccontextmanager
async def all_lost(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Kill every other process of the place and terminate the rest, at once."""
    indexes = range(targets.counts[fault.place])
    found = await asyncio.gather(*(asyncio.to_thread(targets.processes, fault.place, index) for index in indexes))
    for index, processes in enumerate(found):
        for process in processes:
            with suppress(psutil.Error):
                process.terminate() if index % 2 else process.kill()
    yield _pids([process for processes in found for process in processes])


@asynccontextmanager
async def stopped(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """SIGSTOP, then SIGCONT. psutil compares creation times, so a later process with the same pid is not affected."""
    processes = await _processes(targets, fault)
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
async def gateway_without_disk(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """A gateway without Redis, which would write to its spool, with a full disk."""
    processes = await _processes(targets, fault)
    proxy = targets.redis_proxy_of(fault.place, fault.index)
    try:
        with full_disk() as disk, proxy.inject(NetworkFault(refuse=True)):
            for process in processes:
                disk.fill(process)
            yield _pids(processes)
    finally:
        await proxy.reopen()


async def _processes(targets: StackTargets, fault: Planned) -> list[psutil.Process]:
    # Reads all processes of the machine, which takes too long for the event loop of the load.
    found = list(await asyncio.to_thread(targets.processes, fault.place, fault.index))
    if not found:
        raise FaultImpossible("It is down already.")
    return found


def _pids(processes: Iterable[psutil.Process]) -> str:
    pids = [str(process.pid) for process in processes]
    return f"pid {pids[0] if pids else '-'}" + (f" and {len(pids) - 1} more" if len(pids) > 1 else "")


CONNECT_TIMEOUT_S = 1.0
LOOK_S = 0.1
BACKEND = " [local] "  # The process title of a backend has the address of its client.
TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


@asynccontextmanager
async def session(targets: StackTargets) -> AsyncIterator[Connection]:
    """A session without a proxy."""
    connection = await asyncpg.connect(asyncpg_dsn(targets.database_url), timeout=CONNECT_TIMEOUT_S, command_timeout=3)
    try:
        yield connection
    finally:
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            await connection.close(timeout=CONNECT_TIMEOUT_S)


@asynccontextmanager
async def terminated(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Terminate the session of every client."""
    del fault
    async with session(targets) as connection:
        count = await connection.fetchval(TERMINATE)
    yield f"{count} backends"


@asynccontextmanager
async def locked(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Lock the audit table against reads and writes."""
    del fault
    async with session(targets) as connection:
        await connection.execute("BEGIN")
        await connection.execute("SET LOCAL lock_timeout = '2s'")
        await connection.execute("LOCK TABLE requests IN ACCESS EXCLUSIVE MODE")
        yield ""


@asynccontextmanager
async def postgres_without_disk(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """No backend can write a file or WAL, so each commit ends in a crash and a recovery."""
    processes = await _processes(targets, fault)
    disk, stop = FullDisk(), threading.Event()
    filling = asyncio.create_task(asyncio.to_thread(_keep_filling, processes[0], disk, stop))
    try:
        yield ""
    finally:
        stop.set()
        try:
            await filling
        finally:
            await asyncio.to_thread(disk.free)


def _keep_filling(server: psutil.Process, disk: FullDisk, stop: threading.Event) -> None:
    """Include new backends, in a thread: after a recovery all are new."""
    filled: set[int] = set()
    while not stop.wait(LOOK_S):
        for pid in _children(server.pid) - filled:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(BACKEND in title for title in process.cmdline()[:1]):
                    disk.fill(process)
                    filled.add(pid)


def _children(pid: int) -> set[int]:
    """The children of one process from /proc: psutil would read all processes of the machine."""
    with suppress(OSError):
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return set()


PATIENCE_S = 1.0
HEAL_WITHIN_S = 15.0  # Another fault may have stopped or killed Redis meanwhile.
HEAL_POLL_S = 0.1
AOF_WITHIN_S = 2.0  # Enough for the data of such a stack.


@asynccontextmanager
async def redis(url: str) -> AsyncIterator[Redis]:
    """A client of this Redis."""
    client = command_client(url)
    try:
        yield client
    finally:
        await client.aclose()


async def command(url: str, *words: str | int) -> object:
    """Send one command. Raises RedisUnavailable without a reply in time; it may still run later."""
    async with redis(url) as client, bounded(PATIENCE_S):
        return await client.execute_command(*words)  # type: ignore[no-untyped-call]


def redis_command(details: str, *words: str) -> FaultAction:
    """Send one command; `details` is the text for its result."""

    @asynccontextmanager
    async def sent(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
        yield details.format(await command(await targets.redis_server(fault.index), *words))

    return sent


@asynccontextmanager
async def flushed(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Delete all keys."""
    url = await targets.redis_server(fault.index)
    keys = await command(url, "DBSIZE")
    await command(url, "FLUSHALL")
    yield f"{keys} keys"


@asynccontextmanager
async def paused(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Delay all replies for the length of the fault."""
    await command(await targets.redis_server(fault.index), "CLIENT", "PAUSE", round(fault.length_s * 1000), "ALL")
    yield ""


@asynccontextmanager
async def short_of_memory(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Set the memory limit just above the used memory."""
    spare = round(fault.parameters["spare_kib"] * 1024)
    url = await targets.redis_server(fault.index)
    async with redis(url) as client, bounded(PATIENCE_S):
        before = int((await client.config_get("maxmemory"))["maxmemory"] or 0)
        used = int((await client.info("memory"))["used_memory"])
        await client.config_set("maxmemory", used + spare)
    try:
        yield f"maxmemory {used + spare}, {spare} more than used"
    finally:
        await _set(url, "maxmemory", before)


async def _set(url: str, name: str, value: str | int) -> None:
    """Set a configuration value once Redis responds; after a restart it already has its own."""
    deadline = time.monotonic() + HEAL_WITHIN_S
    while True:
        try:
            await command(url, "CONFIG", "SET", name, value)
            return
        except (RedisUnavailable, RedisError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(HEAL_POLL_S)


@asynccontextmanager
async def redis_without_disk(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Fill the disk of the append-only file: writes and PING get MISCONF."""
    processes = await _processes(targets, fault)
    url = await targets.redis_server(fault.index)
    try:
        await command(url, "CONFIG", "SET", "appendonly", "yes")
        await _wait_for_file(url)
        with full_disk() as disk:
            disk.fill(processes[0])
            yield ""
    finally:
        await _set(url, "appendonly", "no")


async def _wait_for_file(url: str) -> None:
    """Wait until the file has the data in memory. Raises FaultImpossible where that takes too long."""
    deadline = time.monotonic() + AOF_WITHIN_S
    while time.monotonic() < deadline:
        async with redis(url) as client, bounded(PATIENCE_S):
            state = await client.info("persistence")
        if not state["aof_rewrite_in_progress"] and not state["aof_rewrite_scheduled"]:
            return
        await asyncio.sleep(HEAL_POLL_S)
    raise FaultImpossible("Redis did not write its append-only file in time.")


def clock_stepped(direction: int) -> FaultAction:
    """Step the wall clock of Redis forwards (1) or backwards (-1), and back at the end."""

    @asynccontextmanager
    async def stepped(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
        step_s = direction * round(fault.parameters["step_s"], 3)
        if targets.redis_clock.why_not:
            raise FaultImpossible(targets.redis_clock.why_not)
        targets.redis_clock.move(step_s)
        try:
            yield step_text(step_s)
        finally:
            targets.redis_clock.move(-step_s)

    return stepped


ACTIONS: Mapping[str, FaultAction] = {
    **{kind.name: killed for kind in KINDS if kind.name.startswith("kill-")},
    **{kind.name: stopped for kind in KINDS if kind.name.startswith("stop-")},
    **{kind.name: ended for kind in KINDS if kind.name.startswith("term-")},
    "lose-workers": all_lost,
    "hostile-client": hostile_client.hostile,
    "spool-full": gateway_without_disk,
    "client-kill-normal": redis_command("{} connections", "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"),
    "client-kill-pubsub": redis_command("{} connections", "CLIENT", "KILL", "TYPE", "pubsub"),
    "flushall": flushed,
    "script-flush": redis_command("", "SCRIPT", "FLUSH"),
    "maxmemory": short_of_memory,
    "client-pause": paused,
    "redis-disk-full": redis_without_disk,
    "clock-forward": clock_stepped(1),
    "clock-backward": clock_stepped(-1),
    "failover": cluster.failed_over,
    "migrate-slot": cluster.slot_moved,
    "delay": network(),
    "drop-requests": network(drop_requests=True),
    "drop-replies": network(drop_replies=True),
    "refuse": network(refuse=True),
    "cut": cut,
    "engine-reset": engine.reset,
    "engine-resets": engine.resets,
    "engine-busy": engine.busy,
    "pg-terminate": terminated,
    "pg-lock": locked,
    "pg-disk-full": postgres_without_disk,
}
