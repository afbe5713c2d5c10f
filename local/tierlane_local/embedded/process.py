"""The process of an embedded server: start, readiness, log, and processes left by an earlier run."""

import asyncio
import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import psutil

from tierlane_local.child_process import KILL_WAIT_S, POLL_S, ChildProcess, family, kill_all, still_runs
from tierlane_local.embedded.error import EmbeddedServerError
from tierlane_local.embedded.process_user import ProcessUser

LOG_TAIL_BYTES = 2000
START_TIMEOUT_S = 30.0  # PostgreSQL replays its log after a crash; Redis reads a large append-only file.


class EmbeddedServer(ChildProcess):
    """A server with the working directory `<data_dir>/<name>/` and, by default, the log `<data_dir>/<name>.log`."""

    def __init__(self, name: str, title: str, data_dir: Path, log: Path | None) -> None:
        """`title` begins error messages."""
        super().__init__(name, name)
        self.home = data_dir.absolute() / name
        self._title = title
        self._log = log or data_dir.absolute() / f"{name}.log"

    @abstractmethod
    async def _responds(self) -> bool:
        """Whether the server accepts requests."""

    @property
    def pid(self) -> int:
        """Raises EmbeddedServerError before the first start."""
        if not super().pid:
            raise EmbeddedServerError("The server has not been started.")
        return super().pid

    def _run(self, argv: Sequence[str], user: ProcessUser | None = None, env: Mapping[str, str] | None = None) -> None:
        """Start the process with its output appended to the log; `env` replaces the environment."""
        user = user or ProcessUser()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab", opener=_open_private) as log:
            # The unprivileged user may not be allowed to enter the current directory.
            self.spawn(argv, prefix=user.prefix, output=log, uid=user.uid, cwd="/", env=env)

    async def _wait_ready(self) -> None:
        """Return when the server responds. Otherwise kill it and raise EmbeddedServerError with the end of its log."""
        deadline = time.monotonic() + START_TIMEOUT_S
        problem = ""
        try:
            while not problem and not await self._responds():
                if not self.alive:
                    problem = "ended while starting"
                elif time.monotonic() > deadline:
                    problem = f"did not respond within {START_TIMEOUT_S:.0f} s"
                await asyncio.sleep(POLL_S)
        except BaseException:
            self.kill()
            raise
        if problem:
            self.kill()
            tail = "(no log)"
            with contextlib.suppress(OSError):
                tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
            raise EmbeddedServerError(f"{self._title} {problem}. The end of {self._log}:\n{tail}")

    async def _end_leftover(self, pid_file: Path, names: Sequence[str]) -> None:
        """Kill the server that an earlier run left in the working directory. Raises EmbeddedServerError if it does not end."""
        leftovers = self._leftovers(pid_file, names)
        kill_all(leftovers)
        deadline = time.monotonic() + KILL_WAIT_S
        while running := [process.pid for process in leftovers if still_runs(process)]:
            if time.monotonic() > deadline:
                raise EmbeddedServerError(f"{self._title} of an earlier run (pid {running[0]}) does not stop; kill it.")
            await asyncio.sleep(POLL_S)

    def _leftovers(self, pid_file: Path, names: Sequence[str]) -> list[psutil.Process]:
        """All processes that run one of `names` in the working directory, if there is a pid file.

        The pid in the file is not used, because it may have been reused, and because a killed PostgreSQL leaves backends
        that hold the shared memory.
        """
        if not pid_file.exists():
            return []
        servers = [process for process in psutil.process_iter() if is_server_of(process, self.home, names)]
        return [member for process in servers for member in family(process.pid)]


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def is_server_of(process: psutil.Process, workdir: Path, names: Container[str]) -> bool:
    """Whether a process runs one of the programs `names` in the working directory `workdir`."""
    try:
        if process.name() not in names:
            return False
        try:
            return workdir.samefile(process.cwd())
        except psutil.AccessDenied:
            # In containers, root without CAP_SYS_PTRACE cannot read the working directory of another user's process.
            return str(workdir) in process.cmdline()
    except (psutil.Error, OSError):
        return False
