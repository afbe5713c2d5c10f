"""Closed-loop load by wrk with post.lua: the same request for every system."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).with_name("post.lua")
MARK = "FIGURES "
THREADS = 2
RESPONSE_TIMEOUT_S = 10
GRACE_S = 20.0
HINT = "wrk is not installed: `apt-get install wrk` on Debian and Ubuntu, `brew install wrk` on macOS."


class WrkError(RuntimeError):
    """wrk returned no figures; the message says why."""


class Target(NamedTuple):
    """The URL of the requests, and the API keys that they use in turn; without keys there is no Authorization."""

    url: str
    keys: tuple[str, ...] = ()


class Figures(NamedTuple):
    """The counts of one run. Times are in microseconds; `bad_status` counts statuses over 399."""

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
        """Responses per second, of any status."""
        return self.answered / (self.microseconds / 1e6)

    @property
    def errors(self) -> int:
        """Connection errors, timeouts and statuses over 399."""
        return self.bad_status + self.connect + self.read + self.write + self.timeout


def installed() -> bool:
    """Whether wrk can be used."""
    return shutil.which("wrk") is not None


def load(target: Target, connections: int, seconds: int) -> Figures:
    """Run wrk. Raises WrkError, also where no request was answered."""
    if not installed():
        raise WrkError(HINT)
    options = [
        f"-t{min(THREADS, connections)}",
        f"-c{connections}",
        f"-d{seconds}s",
        f"--timeout={RESPONSE_TIMEOUT_S}s",
    ]
    command = ["wrk", *options, "-s", str(SCRIPT), target.url]
    environment = {**os.environ, "KEYS": " ".join(target.keys)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds + GRACE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise WrkError(f"wrk did not exit within {seconds + GRACE_S:.0f} s.") from None
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    found = next((line.removeprefix(MARK) for line in lines if line.startswith(MARK)), None)
    if found is None:
        raise WrkError(lines[-1] if lines else "wrk printed nothing.")
    figures = Figures(**json.loads(found))
    if not figures.answered:
        raise WrkError(f"No request was answered ({figures.errors} errors).")
    return figures
