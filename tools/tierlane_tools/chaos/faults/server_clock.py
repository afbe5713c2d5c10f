"""The wall clock of Redis in a chaos stack, which can be stepped while Redis runs, and its steps for the checker.

A preloaded library replaces `gettimeofday` of the server. It is compiled when the stack starts; without a C compiler only
the clock faults are unavailable.
"""

import mmap
import shutil
import struct
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 30.0
OFFSET = struct.Struct("=q")  # Microseconds, as server_clock.c reads them.
FILE_VARIABLE = "CHAOS_CLOCK"

FORWARD, BACKWARD = "clock-forward", "clock-backward"
CLOCK_STEPS = frozenset({FORWARD, BACKWARD})


class ServerClock:
    """The offset of the clock in a file of `directory`; `why_not`: why it cannot be stepped, "" where it can."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "clock"
        self._library = directory / "clock.so"
        self._moved_us = 0
        self.why_not = "The server was not started with a clock that can be stepped."

    def prepare(self) -> None:
        """Compile the library; call it before the server starts. Takes a tenth of a second."""
        self._file.write_bytes(OFFSET.pack(0))
        self.why_not = _compiled(self._library)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of the server, none where its clock cannot be stepped."""
        return {} if self.why_not else {"LD_PRELOAD": str(self._library), FILE_VARIABLE: str(self._file)}

    def move(self, seconds: float) -> None:
        """Step the clock, in addition to earlier steps. It applies at once, also after a restart of the server."""
        self._moved_us += round(seconds * 1_000_000)
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), OFFSET.size) as page:
            OFFSET.pack_into(page, 0, self._moved_us)  # One store, so that no partial value is read.


def _compiled(library: Path) -> str:
    """Compile the library; returns the error, or ""."""
    if sys.platform != "linux":
        return "The clock of one process can be stepped only on Linux."
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return "No C compiler is installed, so the clock cannot be stepped: install gcc."
    with as_file(files("tierlane_tools.chaos.faults").joinpath("server_clock.c")) as source:
        made = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"],
            capture_output=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    if made.returncode != 0:
        return f"{compiler} cannot compile server_clock.c: {made.stderr.decode(errors='replace').strip()[:200]}"
    return ""


def step_text(seconds: float) -> str:
    """A step as in the details of its event."""
    return f"{seconds:+.3f} s"


def parse_step(details: str) -> float:
    """The seconds of `step_text`."""
    return float(details.split(maxsplit=1)[0])


@dataclass(frozen=True)
class ClockStep:
    """The clock was stepped by `by_s` at `at` (monotonic seconds)."""

    at: float
    by_s: float


class SteppedClock:
    """The clock of Redis over one run. The time of a step is known to `stamp_s`."""

    def __init__(self, steps: Iterable[ClockStep], stamp_s: float) -> None:
        self._steps = sorted(steps, key=lambda step: step.at)
        self._stamp_s = stamp_s
        self._ahead = [0.0]
        for step in self._steps:
            self._ahead.append(self._ahead[-1] + step.by_s)
        self._times = [step.at for step in self._steps]

    def __bool__(self) -> bool:
        """Whether there were steps."""
        return bool(self._steps)

    def forward(self, begin: float, end: float) -> float:
        """The sum of the steps forwards in between, in seconds."""
        return sum(step.by_s for step in self._between(begin, end) if step.by_s > 0)

    def backward(self, begin: float, end: float) -> float:
        """The sum of the steps backwards in between, in seconds."""
        return -sum(step.by_s for step in self._between(begin, end) if step.by_s < 0)

    def true_times(self, shown: float) -> list[float]:
        """The times at which the clock may have shown this time: none, one, or several after a step backwards."""
        found = []
        for steps, ahead in enumerate(self._ahead):
            at = shown - ahead
            # The least and the largest number of steps that may have been done by then.
            least, most = (bisect_right(self._times, at + way * self._stamp_s) for way in (-1, 1))
            if least <= steps <= most:
                found.append(at)
        return found

    def _between(self, begin: float, end: float) -> Iterable[ClockStep]:
        return (step for step in self._steps if begin - self._stamp_s <= step.at <= end + self._stamp_s)
