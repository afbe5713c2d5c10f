"""The orphan guard: a process that ends all processes of the stack when `tierlane up` ends.

It is started first, in its own session, with the read end of a pipe whose only write end is in `up`. When `up` ends, also
by SIGKILL, the kernel closes that end. The guard then kills every registered process, its descendants, and every process
with the stack's mark in its environment: processes that `up` could not register any more, and orphans of a dead worker.
Servers overwrite their environment with a title, so they are recognised by their working directory. The guard shares the
lock of the data directory, so that the next `up` waits until everything has ended. If `up` and the guard are both killed,
the kernel ends most processes (`child_process.dying_with_parent`), and the next `up` ends the rest (`leftovers`).

Lines on the pipe: `pid N` registers a process, `server DIR` the servers in a working directory, and `remove DIR` a
temporary directory to delete.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tierlane_local.child_process import family, kill_all, still_runs
from tierlane_local.embedded.binaries import POSTGRES_SERVER, REDIS_NAMES
from tierlane_local.embedded.process import is_server_of
from tierlane_local.up.data_dir import DataDir

# Without the prefix of settings, which reject unknown variables.
MARK_VARIABLE = "_TIERLANE_STACK_MARK"
SERVER_NAMES = (*REDIS_NAMES, POSTGRES_SERVER)
LEASH_FILE = "leash.json"
REMOVABLE_PREFIX = "tierlane-up-"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - for data of this user alone
KILL_WITHIN_S = 2.0
POLL_S = 0.02
RELEASE_WAIT_S = 3.0


class OrphanGuard:
    """The part in `up`: starts the guard, registers processes with it, and restarts it if it ends."""

    def __init__(self, data_dir: DataDir) -> None:
        """The guard shares the lock of `data_dir`; the registrations are also written there, in case the guard is killed."""
        self._data_dir = data_dir
        self._lines: list[str] = []
        self._popen = self._spawn()
        self._save()

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tierlane_local.up.orphan_guard"],
            stdin=subprocess.PIPE,
            pass_fds=(self._data_dir.lock_fd,),
            start_new_session=True,
        )

    def hold(self, pid: int) -> None:
        """Register a process and its descendants."""
        self._register(f"pid {pid}")

    def hold_servers_of(self, workdir: Path) -> None:
        """Register the servers with this working directory, before they start."""
        self._register(f"server {workdir}")

    def remove_at_end(self, directory: Path) -> None:
        """Register a temporary directory to delete."""
        self._register(f"remove {directory}")

    def check(self) -> None:
        """Restart the guard if it was killed, and repeat all registrations."""
        if self._popen.poll() is None:
            return
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        self._popen = self._spawn()
        for line in self._lines:
            self._write(line)

    def release(self) -> None:
        """Close the pipe after everything was stopped, and wait for the guard to end."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._popen.communicate(timeout=RELEASE_WAIT_S)
        self._data_dir.remove(LEASH_FILE)

    def _register(self, line: str) -> None:
        self._lines.append(line)
        self._write(line)
        if not line.startswith("pid "):  # Processes are recognised by their mark.
            self._save()

    def _save(self) -> None:
        lines = [line for line in self._lines if not line.startswith("pid ")]
        with contextlib.suppress(OSError):  # A full disk must not stop the stack.
            self._data_dir.write_json(LEASH_FILE, {"mark": os.environ.get(MARK_VARIABLE, ""), "lines": lines})

    def _write(self, line: str) -> None:
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):  # The guard has ended: `check` restarts it and repeats this line.
                self._popen.stdin.write(f"{line}\n".encode())
                self._popen.stdin.flush()


class Held:
    """The part in the guard: the registered processes and directories."""

    def __init__(self, mark: str) -> None:
        """`mark`: the value in the environment of the stack's processes, "" for none."""
        self._mark = mark
        self._processes: list[psutil.Process] = []
        self._workdirs: list[Path] = []
        self._directories: list[Path] = []

    def note(self, line: str) -> None:
        """Read a line of the pipe. A process that has ended and an invalid line are ignored."""
        verb, _, value = line.strip().partition(" ")
        with contextlib.suppress(psutil.Error, ValueError):
            if verb == "pid":
                # psutil stores the creation time, so that a reused pid is not killed.
                self._processes.append(psutil.Process(int(value)))
            elif verb == "server":
                self._workdirs.append(Path(value))
            elif verb == "remove":
                directory, places = Path(value), (Path(tempfile.gettempdir()), SHARED_MEMORY)
                if directory.parent in places and directory.name.startswith(REMOVABLE_PREFIX):
                    self._directories.append(directory)

    def clear(self) -> None:
        """Kill everything until nothing is left or two seconds have passed, and delete the directories."""
        deadline = time.monotonic() + KILL_WITHIN_S
        while (left := self.left()) and time.monotonic() < deadline:
            kill_all(left)
            time.sleep(POLL_S)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def left(self) -> list[psutil.Process]:
        """All processes that still run."""
        registered = [process.pid for process in self._processes if still_runs(process)]
        found = {process.pid: process for pid in registered for process in family(pid)}
        for process in psutil.process_iter():
            is_server = any(is_server_of(process, workdir, SERVER_NAMES) for workdir in self._workdirs)
            if process.pid != os.getpid() and (is_server or self._is_marked(process)):
                found[process.pid] = process
        return list(found.values())

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            marked = bool(self._mark) and process.environ().get(MARK_VARIABLE) == self._mark
        except (psutil.Error, OSError):
            return False
        return marked and still_runs(process)


def main() -> None:
    """Read lines until the pipe ends, then clear. Signals are ignored, because `up` handles them."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    held = Held(os.environ.get(MARK_VARIABLE, ""))
    for line in sys.stdin:
        held.note(line)
    held.clear()


if __name__ == "__main__":
    main()
