"""jemalloc, preloaded into Redis if it is installed.

The server of the wheel uses the allocator of the C library, which takes a third of its time with many short-lived small
rows. If the library cannot be loaded, the server logs one line and runs without it.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

LIBRARY = "libjemalloc.so.2"
ROOTS = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"))


def find_jemalloc(roots: Iterable[Path] = ROOTS) -> Path | None:
    """The file of the library, None if it is not installed or the system is not Linux."""
    if sys.platform != "linux":
        return None
    # Debian has one directory for each architecture.
    files = (root / directory / LIBRARY for root in roots for directory in (f"{os.uname().machine}-linux-gnu", "."))
    return next((file for file in files if file.is_file()), None)


def with_jemalloc(environment: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """The environment with the library appended to LD_PRELOAD."""
    if library is None:
        return dict(environment)
    preloaded = environment.get("LD_PRELOAD", "")
    return {**environment, "LD_PRELOAD": f"{preloaded}:{library}" if preloaded else str(library)}
