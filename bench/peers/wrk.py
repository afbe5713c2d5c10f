"""The load: wrk with post.lua, closed loop; the same request for every system."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).with_name("post.lua")
MARK = "FIGURES "
THREADS = 2
ANSWER_TIMEOUT_S = 10
GRACE_S = 20.0
HINT = "wrk is not installed: `apt-get install wrk` on Debian and Ubuntu, `brew install wrk` on macOS."


class WrkError(Exception):
    """wrk did not give figures; the message says why."""


class Target(NamedTuple):
    """Where the requests go; keys take turns, none means no Authorization."""

    url: str
    keys: tuple[str, ...] = ()


class Figures(NamedTuple):
    """What one run of wrk counted. Times in microseconds; errors are those of connections plus statuses over 399."""

    answered: int
    microseconds: int
    p50_us: int
    p99_us: int
    max_us: int
    bad_status: int
    connect: int
    read: int
    write: int
    timeout: int

    @property
    def rate(self) -> float:
        """Answers per second, of any status."""
        return self.answered / (self.microseconds / 1e6)

    @property
    def errors(self) -> int:
        """All that was not an answer with a status under 400."""
        return self.bad_status + self.connect + self.read + self.write + self.timeout


def require() -> str:
    """Where wrk is. Raises WrkError with how to get it."""
    found = shutil.which("wrk")
    if found is None:
        raise WrkError(HINT)
    return found


def load(target: Target, connections: int, seconds: int) -> Figures:
    """Load for so long. Raises WrkError."""
    options = [f"-t{min(THREADS, connections)}", f"-c{connections}", f"-d{seconds}s", f"--timeout={ANSWER_TIMEOUT_S}s"]
    command = [require(), *options, "-s", str(SCRIPT), target.url]
    environment = {**os.environ, "KEYS": " ".join(target.keys)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds + GRACE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise WrkError(f"wrk did not end within {seconds + GRACE_S:.0f} s.") from None
    return read_figures(done.stdout.splitlines() + done.stderr.splitlines())


def read_figures(lines: Sequence[str]) -> Figures:
    """The figures that post.lua prints. Raises WrkError when there are none, or nobody was answered."""
    for line in lines:
        if line.startswith(MARK):
            figures = Figures(**json.loads(line.removeprefix(MARK)))
            if not figures.answered:
                raise WrkError(f"No request was answered ({figures.errors} errors).")
            return figures
    raise WrkError(lines[-1] if lines else "wrk printed nothing.")
