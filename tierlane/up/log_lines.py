"""The output of the stack on one stream: whole lines, each with the name of who wrote it, in a colour on a terminal."""

import os
import sys
import threading
from typing import BinaryIO

NAME_WIDTH = 11  # "scheduler-1".
MAX_LINE_BYTES = 64 << 10  # A longer line is cut into several, so that no process can fill our memory.
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
STACK = "tierlane"


class LogLines:
    """Writes prefixed lines from several threads; a stream that is gone is ignored, so that nobody ever blocks."""

    def __init__(self, stream: BinaryIO, *, coloured: bool) -> None:
        """`stream`: where lines go; each is written whole."""
        self._stream = stream
        self._coloured = coloured
        self._lock = threading.Lock()
        self._prefixes: dict[str, bytes] = {}

    def say(self, message: str) -> None:
        """Write a message of the stack itself."""
        for line in message.splitlines() or [""]:
            self.write(STACK, line.encode())

    def raw(self, text: str) -> None:
        """Write text without any prefix."""
        self._emit(text.encode())

    def pump(self, name: str, source: BinaryIO) -> None:
        """Copy lines of `source` until it ends, in a thread of its own."""
        threading.Thread(target=self._copy, args=(name, source), name=f"log of {name}", daemon=True).start()

    def write(self, name: str, line: bytes) -> None:
        """Write one line of `name`."""
        self._emit(self._prefix(name) + line.rstrip(b"\r\n") + b"\n")

    def _copy(self, name: str, source: BinaryIO) -> None:
        with source:
            while line := source.readline(MAX_LINE_BYTES):
                self.write(name, line)

    def _prefix(self, name: str) -> bytes:
        with self._lock:
            if name not in self._prefixes:
                text = f"{name:<{NAME_WIDTH}} | "
                colour = COLOURS[len(self._prefixes) % len(COLOURS)]
                self._prefixes[name] = (f"\x1b[{colour}m{text}\x1b[0m" if self._coloured else text).encode()
            return self._prefixes[name]

    def _emit(self, data: bytes) -> None:
        with self._lock:
            try:
                self._stream.write(data)
                self._stream.flush()
            except (OSError, ValueError):
                return  # The reader of our output has gone; the stack goes on.


def standard_output() -> LogLines:
    """Lines for standard output: coloured when it is a terminal and NO_COLOR is not set."""
    return LogLines(sys.stdout.buffer, coloured=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
