"""Tracebacks of a model that is checked, for its author. A worker prints none: an exception may quote an input."""

import asyncio
import sys
import traceback
from pathlib import Path

from scheduler.errors import TierlaneError

CALLERS = tuple(str(Path(file).parent) for file in (asyncio.__file__, __file__, str(Path(__file__).parent)))
"""Folders whose frames call the model: asyncio, this package, and gpu_pool."""


class Tracebacks:
    """Writes the traceback of an exception to stderr, once for each line that raised: a batch is run several times."""

    def __init__(self) -> None:
        self._written: set[tuple[str, str, int | None]] = set()

    def __call__(self, error: BaseException) -> None:
        """Write the frames of the model's code. Nothing for errors that no line of the model raised."""
        if isinstance(error, TierlaneError):
            return
        found = traceback.TracebackException.from_exception(error)
        own = next((at for at, frame in enumerate(found.stack) if not frame.filename.startswith(CALLERS)), 0)
        del found.stack[:own]
        last = (found.stack[-1].filename, found.stack[-1].lineno) if found.stack else ("", 0)
        if (key := (type(error).__name__, *last)) not in self._written:
            self._written.add(key)
            sys.stderr.write("".join(found.format()))
            sys.stderr.flush()
