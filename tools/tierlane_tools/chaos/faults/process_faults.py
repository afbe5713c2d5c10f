"""Faults of role processes: signals, and a gateway whose disk is full."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

import psutil

from tierlane_tools.chaos.faults.full_disk import full_disk
from tierlane_tools.chaos.faults.proxy import NetworkFault
from tierlane_tools.chaos.faults.schedule import Planned
from tierlane_tools.chaos.faults.target import FaultAction, FaultImpossible, StackTargets


def _signal(send: Callable[[psutil.Process], None]) -> FaultAction:
    @asynccontextmanager
    async def signalled(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
        processes = await running_processes(targets, fault)
        for process in processes:
            with suppress(psutil.Error):
                send(process)
        yield pids_text(processes)

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
    yield pids_text([process for processes in found for process in processes])


@asynccontextmanager
async def stopped(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """SIGSTOP, then SIGCONT. psutil compares creation times, so a later process with the same pid is not affected."""
    processes = await running_processes(targets, fault)
    try:
        for process in processes:
            with suppress(psutil.Error):
                process.suspend()
        yield pids_text(processes)
    finally:
        for process in reversed(processes):
            with suppress(psutil.Error):
                process.resume()


@asynccontextmanager
async def gateway_without_disk(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """A gateway without Redis, which would write to its spool, with a full disk."""
    processes = await running_processes(targets, fault)
    proxy = targets.redis_proxy_of(fault.place, fault.index)
    try:
        with full_disk() as disk, proxy.inject(NetworkFault(refuse=True)):
            for process in processes:
                disk.fill(process)
            yield pids_text(processes)
    finally:
        await proxy.reopen()


async def running_processes(targets: StackTargets, fault: Planned) -> list[psutil.Process]:
    # Reads all processes of the machine, which takes too long for the event loop of the load.
    found = list(await asyncio.to_thread(targets.processes, fault.place, fault.index))
    if not found:
        raise FaultImpossible("It is down already.")
    return found


def pids_text(processes: Iterable[psutil.Process]) -> str:
    pids = [str(process.pid) for process in processes]
    return f"pid {pids[0] if pids else '-'}" + (f" and {len(pids) - 1} more" if len(pids) > 1 else "")
