"""The wall clock of the chaos stack's Redis, which can be moved while it runs.

A library of a page of C is put before the server's own `gettimeofday`. It is compiled when the stack starts, since its
only user is this tool; without a C compiler there is no such fault, and everything else works.
"""

import mmap
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
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
