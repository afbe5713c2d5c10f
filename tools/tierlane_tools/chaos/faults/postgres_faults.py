"""Faults of PostgreSQL: terminated sessions, a locked table, a full disk."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncpg
import psutil

from ledger.postgres import Connection, asyncpg_dsn
from tierlane_tools.chaos.faults.full_disk import FullDisk
from tierlane_tools.chaos.faults.process_faults import running_processes
from tierlane_tools.chaos.faults.schedule import Planned
from tierlane_tools.chaos.faults.target import StackTargets

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
    processes = await running_processes(targets, fault)
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
        children: set[int] = set()
        with suppress(OSError):  # From /proc, because psutil would read all processes of the machine.
            children.update(map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()))
        for pid in children - filled:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(BACKEND in title for title in process.cmdline()[:1]):
                    disk.fill(process)
                    filled.add(pid)
