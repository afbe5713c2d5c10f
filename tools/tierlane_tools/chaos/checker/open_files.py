"""The open files of processes before and after a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

Files = Mapping[tuple[str, int, float], int]


@dataclass(frozen=True)
class FileCount:
    """Open files of a process before and after the run."""

    process: str
    before: int
    after: int


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
