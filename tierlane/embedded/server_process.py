"""A server's process with its log, and the clearing away of one that an earlier run left behind."""

import asyncio
import contextlib
import os
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import psutil

from tierlane.child_process import KILL_WAIT_S, POLL_S, ChildProcess, family, kill_all, still_runs
from tierlane.embedded.errors import EmbeddedServerError
from tierlane.embedded.process import Identity

LOG_TAIL_BYTES = 2000


class ServerProcess(ChildProcess):
    """The process of one server; `workdir` is its working directory, by which a leftover of it is recognised."""

    def __init__(self, title: str, workdir: Path, log: Path) -> None:
        """`title` begins its error sentences; `log` takes its output."""
        super().__init__()
        self._title = title
        self._workdir = workdir
        self._log = log

    def run(self, argv: Sequence[str], identity: Identity | None = None, env: Mapping[str, str] | None = None) -> None:
        """Spawn the server with its output appended to the log; `env` instead of our own environment."""
        run_as = identity or Identity()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab", opener=_open_private) as log:
            # The root directory, since an unprivileged user may not be allowed to be where we are.
            self.spawn(argv, prefix=run_as.prefix, output=log, uid=run_as.uid, cwd="/", env=env)

    def failure(self, what: str) -> EmbeddedServerError:
        """Return an error that says `what` went wrong and ends with the last lines of the log."""
        return EmbeddedServerError(f"{self._title} {what}. The end of {self._log}:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
        return "(no log)"

    async def clear_leftover(self, pid: int | None, names: Sequence[str]) -> None:
        """Kill the server that an earlier run left behind on our working directory; `pid` is from its pid file.

        A pid file proves nothing (the number may be reused), so a process is ours only when it runs one of `names`
        inside `workdir`. Every process is looked at, since a killed PostgreSQL leaves backends that hold the shared
        memory for a moment. Raises EmbeddedServerError when one does not go away.
        """
        if pid is None:
            return
        ours = [process for process in psutil.process_iter() if is_server_of(process, self._workdir, names)]
        leftovers = [member for process in ours for member in family(process.pid)]
        kill_all(leftovers)
        deadline = time.monotonic() + KILL_WAIT_S
        while any(still_runs(process) for process in leftovers):
            if time.monotonic() > deadline:
                raise EmbeddedServerError(f"{self._title} of an earlier run (pid {pid}) does not stop; kill it.")
            await asyncio.sleep(POLL_S)


def read_pid(path: Path) -> int | None:
    """Return the number in the first line of a pid file, or None when the file is absent or holds no number."""
    try:
        return int(path.read_text().splitlines()[0])
    except (OSError, ValueError, IndexError):
        return None


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def is_server_of(process: psutil.Process, workdir: Path, names: Container[str]) -> bool:
    """Whether a process runs one of the programs `names` inside `workdir`."""
    try:
        return process.name() in names and _works_in(process, workdir)
    except (psutil.Error, OSError):
        return False


def _works_in(process: psutil.Process, workdir: Path) -> bool:
    try:
        return workdir.samefile(process.cwd())
    except psutil.AccessDenied:
        # A root without CAP_SYS_PTRACE (containers) may not ask where another user's process works.
        return str(workdir) in process.cmdline()
