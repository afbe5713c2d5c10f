"""One child process with its descendants: spawned in a session of its own, watched, stopped by signal, then killed.

Plain Popen and polling, not asyncio's subprocesses: an embedded server outlives the event loop that started it when
test fixtures use one loop each.
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
from collections.abc import Mapping, Sequence
from typing import IO, BinaryIO

import psutil

POLL_S = 0.01
KILL_WAIT_S = 2.0
PROBE_TIMEOUT_S = 5.0


class ChildProcess:
    """A child that may be spawned again after it ended; `pid` and `returncode` are those of the latest run."""

    def __init__(self) -> None:
        """Make a child that has not been spawned."""
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the latest run, 0 before the first."""
        return self._popen.pid if self._popen else 0

    @property
    def alive(self) -> bool:
        """Whether it runs now."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit code of the latest run (minus the signal's number when killed), None while it runs."""
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
        """Run `argv`, with both outputs to `output`; as another user (and the group of that number) when `uid` is set.

        `prefix`: a command that ends by running what follows it. Where the system can, the kernel kills the child when the
        thread that started it ends, which is the main one of our processes: not even SIGKILL of a parent leaves it behind.
        A session of its own keeps a terminal's Ctrl-C away from it: who stops it, and when, is its parent's choice.
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
        """Run `argv` and return its output, which the caller must read to the end."""
        reading, writing = os.pipe()
        try:
            self.spawn(argv, output=writing, env=env)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return os.fdopen(reading, "rb")

    async def stop(self, first: signal.Signals, grace_s: float) -> None:
        """Send `first`, wait up to `grace_s` seconds, then kill what is left. Harmless when it does not run."""
        if self._popen is None or not self.alive:
            return
        processes = family(self._popen.pid)
        self._popen.send_signal(first)
        await self._ended_within(grace_s)
        kill_all(processes)
        await self._ended_within(KILL_WAIT_S)

    def kill(self) -> None:
        """Kill it with its descendants at once and reap it. Harmless when it does not run."""
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
    """What to put before a command so that it is killed when its parent ends (prctl(2), PR_SET_PDEATHSIG); () where that cannot be.

    A program of util-linux, since a Python function between fork and exec may hang where there are threads.
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
    """Return the process `pid` and all its descendants, or nothing when it is gone."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kill each that still runs. psutil compares creation times first, so a reused pid is never hit."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def still_runs(process: psutil.Process) -> bool:
    """Whether the very same process still runs; one that ended but is not reaped yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
