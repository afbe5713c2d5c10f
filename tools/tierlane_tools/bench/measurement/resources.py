"""CPU and memory of processes by role.

They are read from the processes themselves, off the event loop; processes that were replaced cannot be read any more and
are named instead.
"""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from tierlane_local.stack_file import ProcessInfo

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
