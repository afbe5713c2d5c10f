"""No orphans: a process that outlives a killed `tierlane up` for a moment and takes all its processes with it.

It is started first, in a session of its own, and holds the read end of a pipe whose only write end is in `up`; when
`up` ends in whatever way, SIGKILL included, the kernel closes that end. What it then kills: every process that was
named to it, the descendants of those, and every process that carries the stack's mark in its environment. The mark
covers what `up` started but could not name any more, and the orphans of a worker that died before. Servers overwrite
their environment with a title, so they are also known by their working directory. It holds the lock of the data
directory too, so that the next `up` waits until everything is gone. Should both be killed, the kernel ends what it can
(`child_process.dying_with_parent`), and the next `up` finds the rest (`leftovers`).

Lines on the pipe: `pid N` to watch over a process, `server DIR` over the servers that work in a directory, `remove DIR`
to delete a temporary directory at the end.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tierlane.child_process import family, kill_all, still_runs
from tierlane.embedded.process import POSTGRES_SERVER, REDIS_NAMES, is_server_of
from tierlane.up.data_dir import DataDir

# Without the prefix of settings, which refuse what they do not know.
MARK_VARIABLE = "_TIERLANE_STACK_MARK"
SERVER_NAMES = (*REDIS_NAMES, POSTGRES_SERVER)
LEASH_FILE = "leash.json"
REMOVABLE_PREFIX = "tierlane-up-"
KILL_WITHIN_S = 2.0
POLL_S = 0.02
RELEASE_WAIT_S = 3.0


class OrphanGuard:
    """The side of `up`: starts the process, names to it what must not outlive us, starts it again if it dies."""

    def __init__(self, data_dir: DataDir) -> None:
        """`data_dir`: the process shares its lock, and what it is to know is written down there, should it be killed, too."""
        self._data_dir = data_dir
        self._lines: list[str] = []
        self._popen = self._spawn()
        self._write_down()

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tierlane.up.orphan_guard"],
            stdin=subprocess.PIPE,
            pass_fds=(self._data_dir.lock_fd,),
            start_new_session=True,
        )

    def hold(self, pid: int) -> None:
        """Have `pid` and its descendants killed when this process ends."""
        self._tell(f"pid {pid}")

    def hold_servers_of(self, workdir: Path) -> None:
        """Have the servers that work in `workdir` killed when this process ends, from before they are started."""
        self._tell(f"server {workdir}")

    def remove_at_end(self, directory: Path) -> None:
        """Have a temporary directory deleted when this process ends."""
        self._tell(f"remove {directory}")

    def check(self) -> None:
        """Start the process again when somebody killed it, and tell it everything anew."""
        if self._popen.poll() is None:
            return
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        self._popen = self._spawn()
        for line in self._lines:
            self._write(line)

    def release(self) -> None:
        """Close the pipe after everything was stopped, and wait until the process has found nothing left to kill."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._popen.communicate(timeout=RELEASE_WAIT_S)
        self._data_dir.remove(LEASH_FILE)

    def _tell(self, line: str) -> None:
        self._lines.append(line)
        self._write(line)
        if not line.startswith("pid "):  # Processes are found by their mark.
            self._write_down()

    def _write_down(self) -> None:
        lines = [line for line in self._lines if not line.startswith("pid ")]
        with contextlib.suppress(OSError):  # A full disk must not take the stack down.
            self._data_dir.write_json(LEASH_FILE, {"mark": os.environ.get(MARK_VARIABLE, ""), "lines": lines})

    def _write(self, line: str) -> None:
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):  # It died: `check` will start it again and repeat this line.
                self._popen.stdin.write(f"{line}\n".encode())
                self._popen.stdin.flush()


class Held:
    """The side of the leash: the processes and directories that were named."""

    def __init__(self, mark: str) -> None:
        """`mark`: the value that the stack's processes carry in their environment, "" for none."""
        self._mark = mark
        self._processes: list[psutil.Process] = []
        self._workdirs: list[Path] = []
        self._directories: list[Path] = []

    def note(self, line: str) -> None:
        """Take one line of the pipe; a process that is gone already, or a strange line, is ignored."""
        verb, _, value = line.strip().partition(" ")
        with contextlib.suppress(psutil.Error, ValueError):
            if verb == "pid":
                # The object remembers the creation time, so that a later process of that number is not hit.
                self._processes.append(psutil.Process(int(value)))
            elif verb == "server":
                self._workdirs.append(Path(value))
            elif verb == "remove" and _is_removable(Path(value)):
                self._directories.append(Path(value))

    def clear_away(self) -> None:
        """Kill everything, look again until nothing is left or two seconds have passed, delete the directories."""
        deadline = time.monotonic() + KILL_WITHIN_S
        while (left := self.left()) and time.monotonic() < deadline:
            kill_all(left)
            time.sleep(POLL_S)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def left(self) -> list[psutil.Process]:
        """Every process that still runs, each once."""
        return list({process.pid: process for process in self._found()}.values())

    def _found(self) -> Iterator[psutil.Process]:
        for process in self._processes:
            if still_runs(process):
                yield from family(process.pid)
        for process in psutil.process_iter():
            if process.pid != os.getpid() and (self._is_marked(process) or self._is_server(process)):
                yield process

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            marked = bool(self._mark) and process.environ().get(MARK_VARIABLE) == self._mark
        except (psutil.Error, OSError):
            return False
        return marked and still_runs(process)

    def _is_server(self, process: psutil.Process) -> bool:
        return any(is_server_of(process, workdir, SERVER_NAMES) for workdir in self._workdirs)


def _is_removable(directory: Path) -> bool:
    return directory.parent == Path(tempfile.gettempdir()) and directory.name.startswith(REMOVABLE_PREFIX)


def main() -> None:
    """Read lines until the pipe ends, then clear away. Signals are left to `up`, which always ends first."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    held = Held(os.environ.get(MARK_VARIABLE, ""))
    for line in sys.stdin:
        held.note(line)
    held.clear_away()


if __name__ == "__main__":
    main()
