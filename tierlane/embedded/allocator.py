"""jemalloc for the embedded Redis, where the system has it.

Redis is made for jemalloc, and its packages bring it; the wheel's server was built with the C library's allocator, which
takes a third of its time in a pool of small rows that come and go. A library that cannot be loaded costs a line in the
server's log, nothing else.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

LIBRARY = "libjemalloc.so.2"
ROOTS = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"))


def find_jemalloc(roots: Iterable[Path] = ROOTS) -> Path | None:
    """Return the library's file, or None where the system has none (or another way of preloading)."""
    if sys.platform != "linux":
        return None
    return next((file for root in roots for file in _candidates(root) if file.is_file()), None)


def with_jemalloc(environment: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """Return the environment in which a program uses the library, behind whatever it is told to preload already."""
    if library is None:
        return dict(environment)
    told = environment.get("LD_PRELOAD", "")
    return {**environment, "LD_PRELOAD": f"{told}:{library}" if told else str(library)}


def _candidates(root: Path) -> list[Path]:
    # Debian has a folder for each architecture; a 64-bit Python's is the one that is named after it.
    return [root / f"{os.uname().machine}-linux-gnu" / LIBRARY, root / LIBRARY]
