"""The processes of one system: started in an empty folder, awaited, stopped."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
from catalogue import HERE, Peer, Place
from descendants import stop_all
from measuring import wait_for
from wrk import Target

START_S = 90.0
PATH = "/inference"


class StartError(Exception):
    """A system exited before its first response, or exceeded its time limit; the message has its last output line."""


class Job(NamedTuple):
    """The same for all: duration and window of a batch in ms, its size, the number of GPUs, and the time limit of a system."""

    window_ms: int
    limit_s: int
    service_ms: int = 50
    batch: int = 64
    gpus: int = 34


class Processes:
    """Started processes with one log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.roots: list[psutil.Popen] = []

    def start(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> psutil.Popen:
        """Start a process."""
        with self.log.open("ab") as log:
            root = psutil.Popen(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.roots.append(root)
        return root

    def still_alive(self) -> None:
        """Raise StartError when a process has exited."""
        for root in self.roots:
            if root.poll() is not None:
                raise StartError(f"ended with exit code {root.returncode}: {self.last_line()}")

    def last_line(self) -> str:
        """The last line of the log."""
        lines = [line.strip() for line in self.log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
        return lines[-1][:200] if lines else "no output"


@contextmanager
def processes(limit_s: int) -> Iterator[tuple[Processes, Path]]:
    """A group of processes and an empty folder, removed at the end. Raises StartError after `limit_s` seconds."""
    with ExitStack() as stack:
        # Short, because some peers create sockets here.
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peer", ignore_cleanup_errors=True)))
        group = Processes(home / "log")
        stack.callback(lambda: stop_all(group.roots))
        stack.callback(signal.alarm, 0)  # Stopping has its own limit.
        signal.signal(signal.SIGALRM, lambda *_: _time_out(limit_s))
        signal.alarm(limit_s)
        yield group, home


def _time_out(limit_s: int) -> None:
    raise StartError(f"not done within {limit_s} s")


@contextmanager
def running(peer: Peer, python: Path, port: int, job: Job) -> Iterator[Target]:
    """Run a peer until the end of the block. Raises StartError and JobError."""
    with processes(job.limit_s) as (group, home):
        place = Place(python, home, port)
        environment = {**os.environ, **_environment(place, job), **peer.environment(place)}
        for command in peer.commands(place):
            for _ in range(command.copies):
                group.start(command.words, peer.folder, environment)
        target = Target(f"http://127.0.0.1:{port}{PATH}")
        wait_for(target, START_S, group.still_alive)
        yield target


def _environment(place: Place, job: Job) -> dict[str, str]:
    return {
        "PATH": f"{place.python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(HERE / "job"),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(place.home),
        "PEER_HOME": str(place.home),
        "PEER_PORT": str(place.port),
        "PEER_BATCH": str(job.batch),
        "PEER_GPUS": str(job.gpus),
        "PEER_SERVICE_MS": str(job.service_ms),
        "PEER_WINDOW_MS": str(job.window_ms),
    }
