"""Faults of PostgreSQL that are not signals: sessions ended, a table locked, a disk that takes nothing more."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncpg
import psutil

from ledger.postgres import Connection, asyncpg_dsn
from tierlane.chaos.faults.target import FaultImpossible
from tierlane.chaos.file_limits import FullDisk
from tierlane.chaos.ground import Ground
from tierlane.chaos.schedule import Planned

CONNECT_TIMEOUT_S = 1.0
LOOK_S = 0.1
BACKEND = " [local] "  # The server writes into the title of a process where its client is.
TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


@asynccontextmanager
async def session(ground: Ground) -> AsyncIterator[Connection]:
    """A session of our own, past all proxies."""
    connection = await asyncpg.connect(asyncpg_dsn(ground.database_url), timeout=CONNECT_TIMEOUT_S, command_timeout=3)
    try:
        yield connection
    finally:
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            await connection.close(timeout=CONNECT_TIMEOUT_S)


@asynccontextmanager
async def terminated(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """Every client is thrown out."""
    del fault
    async with session(ground) as connection:
        count = await connection.fetchval(TERMINATE)
    yield f"{count} backends"


@asynccontextmanager
async def locked(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """Nobody else can read or write the audit."""
    del fault
    async with session(ground) as connection:
        await connection.execute("BEGIN")
        await connection.execute("SET LOCAL lock_timeout = '2s'")
        await connection.execute("LOCK TABLE requests IN ACCESS EXCLUSIVE MODE")
        yield ""


@asynccontextmanager
async def without_disk(ground: Ground, fault: Planned) -> AsyncIterator[str]:
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
