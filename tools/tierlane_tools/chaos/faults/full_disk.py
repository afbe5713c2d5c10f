"""A full disk, simulated by a file size limit of single processes: they get EFBIG, which is handled like ENOSPC."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tierlane_tools.chaos.faults.target import FaultImpossible

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
            # Set the limit as the user of the process: root may lack CAP_SYS_RESOURCE in containers.
            limit = "0:" if full else "unlimited:"
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
