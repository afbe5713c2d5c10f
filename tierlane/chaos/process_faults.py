"""Faults of processes: killed, stopped, or on a disk that is full."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

import psutil

from tierlane.chaos.faults.proxy import Weather
from tierlane.chaos.faults.target import Doing, FaultImpossible
from tierlane.chaos.file_limits import full_disk
from tierlane.chaos.ground import Ground
from tierlane.chaos.schedule import Planned


def _blow(strike: Callable[[psutil.Process], None]) -> Doing:
    @asynccontextmanager
    async def struck(ground: Ground, fault: Planned) -> AsyncIterator[str]:
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
async def all_lost(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """Every process of the place at once: every other one killed, the rest told to end."""
    everybody = range(ground.targets[fault.place])
    found = await asyncio.gather(*(asyncio.to_thread(ground.processes, fault.place, index) for index in everybody))
    for index, processes in enumerate(found):
        for process in processes:
            with suppress(psutil.Error):
                process.terminate() if index % 2 else process.kill()
    yield _pids([process for processes in found for process in processes])


@asynccontextmanager
async def stopped(ground: Ground, fault: Planned) -> AsyncIterator[str]:
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
async def without_disk(ground: Ground, fault: Planned) -> AsyncIterator[str]:
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


async def _processes(ground: Ground, fault: Planned) -> list[psutil.Process]:
    # Looking for children reads about every process of the machine, too long for the loop that carries the load.
    found = list(await asyncio.to_thread(ground.processes, fault.place, fault.index))
    if not found:
        raise FaultImpossible("It is down already.")
    return found


def _pids(processes: Iterable[psutil.Process]) -> str:
    pids = [str(process.pid) for process in processes]
    return f"pid {pids[0] if pids else '-'}" + (f" and {len(pids) - 1} more" if len(pids) > 1 else "")
