"""A peer from its first process to the end of its last: a home of its own, started, awaited, stopped."""
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
from answers import wait_for
from catalogue import HERE, Peer, Place
from descendants import stop_all
from wrk import Target

START_S = 90.0
PATH = "/inference"


class StartError(Exception):
    """A system ended before it answered, with the last line of what it said; or it was given up."""


class Job(NamedTuple):
    """What all do alike: milliseconds a batch takes and may wait for company, its size, and how many run at a time.

    After `limit_s` seconds a system is given up, wherever it is.
    """

    window_ms: int
    limit_s: int
    service_ms: int = 50
    batch: int = 64
    gpus: int = 34


class Processes:
    """Those that were started here, with one log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.roots: list[psutil.Popen] = []

    def start(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> psutil.Popen:
        """Start one."""
        with self.log.open("ab") as log:
            root = psutil.Popen(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.roots.append(root)
        return root

    def still_alive(self) -> None:
        """Raises StartError when one has ended."""
        for root in self.roots:
            if root.poll() is not None:
                raise StartError(f"ended with exit code {root.returncode}: {self.last_words()}")

    def last_words(self) -> str:
        """The last line of the log."""
        lines = [line.strip() for line in self.log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
        return lines[-1][:200] if lines else "it said nothing"


@contextmanager
def processes(limit_s: int) -> Iterator[tuple[Processes, Path]]:
    """A group of processes and an empty folder; both are gone at the end. Raises StartError after so many seconds."""
    with ExitStack() as stack:
        # Some put sockets here, whose paths must be short.
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peer", ignore_cleanup_errors=True)))
        group = Processes(home / "log")
        stack.callback(lambda: stop_all(group.roots))
        stack.callback(signal.alarm, 0)  # The limit is not for the stopping, which has its own.
        signal.signal(signal.SIGALRM, lambda *_: _give_up(limit_s))
        signal.alarm(limit_s)
        yield group, home


def _give_up(limit_s: int) -> None:
    raise StartError(f"not done within {limit_s} s")


@contextmanager
def running(peer: Peer, python: Path, port: int, job: Job) -> Iterator[Target]:
    """The peer, answering. Raises StartError and JobError."""
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
