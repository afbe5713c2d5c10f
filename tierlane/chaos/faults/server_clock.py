"""The wall clock of the chaos stack's Redis, which can be moved while it runs, and the steps as the checker reads them.

A library of a page of C is put before the server's own `gettimeofday`. It is compiled when the stack starts, since its
only user is this tool; without a C compiler there is no such fault, and everything else works.
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


class ServerClock:
    """How far the clock is moved, in a file of `directory`; `why_not` says why it cannot be moved, "" where it can."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "clock"
        self._library = directory / "clock.so"
        self._moved_us = 0
        self.why_not = "The server was not started with a clock that can be moved."

    def prepare(self) -> None:
        """Compile the library; call it before the server starts. Takes a tenth of a second."""
        self._file.write_bytes(OFFSET.pack(0))
        self.why_not = _compiled(self._library)

    @property
    def environment(self) -> Mapping[str, str]:
        """What the server's environment needs, nothing where its clock cannot be moved."""
        return {} if self.why_not else {"LD_PRELOAD": str(self._library), FILE_VARIABLE: str(self._file)}

    def move(self, seconds: float) -> None:
        """Step by so much, in addition to earlier steps; it counts at once, and survives a restart of the server."""
        self._moved_us += round(seconds * 1_000_000)
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), OFFSET.size) as page:
            OFFSET.pack_into(page, 0, self._moved_us)  # One store, so that no half of a value is ever read.


def _compiled(library: Path) -> str:
    """Make the library; in one sentence why there is none, "" where there is."""
    if sys.platform != "linux":
        return "Only on Linux can the clock of one process be moved."
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return "There is no C compiler to make a clock that can be moved: install gcc."
    with as_file(files("tierlane.chaos.faults").joinpath("server_clock.c")) as source:
        made = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"],
            capture_output=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    if made.returncode != 0:
        return f"{compiler} cannot compile server_clock.c: {made.stderr.decode(errors='replace').strip()[:200]}"
    return ""


FORWARD, BACKWARD = "clock-forward", "clock-backward"
CLOCK_STEPS = frozenset({FORWARD, BACKWARD})


def told_step(seconds: float) -> str:
    """As the details of the event have it."""
    return f"{seconds:+.3f} s"


def read_step(details: str) -> float:
    """The seconds of `told_step`."""
    return float(details.split(maxsplit=1)[0])


@dataclass(frozen=True)
class ClockStep:
    """At `at` (monotonic seconds) the clock was moved by `by_s`."""

    at: float
    by_s: float


class SteppedClock:
    """The clock of Redis over one run. An event is stamped shortly after its step, so a step is a span of `stamp_s`."""

    def __init__(self, steps: Iterable[ClockStep], stamp_s: float) -> None:
        self._steps = sorted(steps, key=lambda step: step.at)
        self._stamp_s = stamp_s
        self._ahead = [0.0]
        for step in self._steps:
            self._ahead.append(self._ahead[-1] + step.by_s)
        self._times = [step.at for step in self._steps]

    def __bool__(self) -> bool:
        """Whether it ever stepped."""
        return bool(self._steps)

    def forward(self, begin: float, end: float) -> float:
        """Seconds by which it went forwards in between, over all steps in that direction."""
        return sum(step.by_s for step in self._between(begin, end) if step.by_s > 0)

    def backward(self, begin: float, end: float) -> float:
        """Seconds by which it went backwards in between, over all steps in that direction."""
        return -sum(step.by_s for step in self._between(begin, end) if step.by_s < 0)

    def true_times(self, shown: float) -> list[float]:
        """When it may have been that the clock showed this time: none, one, or several after a step backwards."""
        return [shown - ahead for steps, ahead in enumerate(self._ahead) if self._may_have(steps, shown - ahead)]

    def _between(self, begin: float, end: float) -> Iterable[ClockStep]:
        return (step for step in self._steps if begin - self._stamp_s <= step.at <= end + self._stamp_s)

    def _may_have(self, steps: int, at: float) -> bool:
        """Whether so many steps may have been made by then."""
        least, most = (bisect_right(self._times, at + way * self._stamp_s) for way in (-1, 1))
        return least <= steps <= most
