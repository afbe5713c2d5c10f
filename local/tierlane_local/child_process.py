"""A child process and its descendants: started in its own session, stopped by a signal, then killed.

It uses Popen and polling instead of asyncio's subprocesses: in test fixtures with one event loop each, an embedded
server outlives the loop that started it.
"""

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import IO, BinaryIO

import psutil

POLL_S = 0.01
KILL_WAIT_S = 2.0
PROBE_TIMEOUT_S = 5.0


class ChildProcess(ABC):
    """A process that can be started again after it ended; `pid` and `returncode` are those of the latest run.

    `role` and `name` are its names in stack.json.
    """

    STOP_SIGNAL = signal.SIGTERM

    def __init__(self, role: str, name: str) -> None:
        self.role = role
        self.name = name
        self._popen: subprocess.Popen[bytes] | None = None

    @abstractmethod
    async def start(self) -> None:
        """Start the process; a server has to respond before this returns."""

    @property
    def pid(self) -> int:
        """0 before the first run."""
        return self._popen.pid if self._popen else 0

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit code, -N after signal N; None while the process runs."""
        return self._popen.poll() if self._popen else None

    def spawn(
        self,
        argv: Sequence[str],
        *,
        output: IO[bytes] | int,
        prefix: Sequence[str] = (),
        uid: int | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run `argv` with stdout and stderr sent to `output`; with `uid`, as that user and the group of the same number.

        `prefix` is a command that executes its arguments, such as setpriv. Where supported, the kernel kills the child when
        the thread that started it ends (the main thread), so that even SIGKILL of the parent leaves no child. The child
        has its own session, so that Ctrl-C in a terminal reaches the parent only.
        """
        self._popen = subprocess.Popen(
            [*prefix, *dying_with_parent(), *argv],
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def spawn_piped(self, argv: Sequence[str], env: Mapping[str, str]) -> BinaryIO:
        """Run `argv` and return its output. The caller must read it to the end."""
        reading, writing = os.pipe()
        try:
            self.spawn(argv, output=writing, env=env)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return os.fdopen(reading, "rb")

    async def stop(self, grace_s: float) -> None:
        """Send STOP_SIGNAL; after `grace_s` seconds, kill the process and its descendants. No effect when it does not run."""
        if self._popen is None or not self.alive:
            return
        processes = family(self._popen.pid)
        self._popen.send_signal(self.STOP_SIGNAL)
        await self._ended_within(grace_s)
        kill_all(processes)
        await self._ended_within(KILL_WAIT_S)

    def kill(self) -> None:
        """Kill the process and its descendants, and reap it. No effect when it does not run."""
        if self._popen is not None and self.alive:
            kill_all(family(self._popen.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(KILL_WAIT_S)

    async def _ended_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:  # noqa: ASYNC110 - a process has no event to wait for
            await asyncio.sleep(POLL_S)


@functools.cache
def dying_with_parent() -> tuple[str, ...]:
    """The command prefix that makes the kernel kill a child when its parent ends (PR_SET_PDEATHSIG); () if not supported.

    It uses setpriv of util-linux, because Python code between fork and exec can deadlock in a process with threads.
    """
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    if setpriv is None:
        return ()
    command = (setpriv, "--pdeathsig", "KILL")
    try:
        probe = subprocess.run(
            [*command, "--", sys.executable, "-S", "-c", ""], capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return (*command, "--") if probe.returncode == 0 else ()


def family(pid: int) -> list[psutil.Process]:
    """The process and its descendants; empty when it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kill the processes that still run. psutil compares creation times, so a reused pid is never killed."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def still_runs(process: psutil.Process) -> bool:
    """Whether the same process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
