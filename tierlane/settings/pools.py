"""The further pools of a local stack (`--pools`), and the defaults that depend on the backend and on the host.

A model gets the host's CPU threads, shared by its workers; `tiny` gets one. A full batch is what a model can do in one
go without making its first member wait.
"""

import os
import re
from dataclasses import dataclass

from tierlane.settings.checks import MAX_WORKERS

TINY_BATCH_SIZE = 8  # On a CPU core; a GPU takes many times as much.
BATCH_SIZE = 32

_POOL = re.compile(r"\s*([a-z][a-z0-9_-]{0,62})=(.+?)(?:\*(\d{1,3}))?\s*")


def default_batch_size(backend: str) -> int:
    """The size for the backend of `--backend`."""
    return TINY_BATCH_SIZE if is_tiny(backend) else BATCH_SIZE


def is_tiny(backend: str) -> bool:
    """Whether it is the small model that ships with the project."""
    return backend.partition(":")[0] == "tiny"


def default_torch_threads(backend: str, workers: int = 1) -> int:
    """The number for the backend of `--backend`, where so many workers share the host.

    The matrices of `tiny` are so small that its threads wait for each other most of the time: on two busy cores 64 steps of 16
    rows took 7.2 s with two threads, and 0.9 s with one.
    """
    return 1 if is_tiny(backend) else max(1, (os.cpu_count() or 1) // workers)


class PoolsError(ValueError):
    """What was said of the pools cannot be meant; its text names the part."""


@dataclass(frozen=True)
class OtherPool:
    """One pool and its workers."""

    pool: str
    backend: str
    workers: int = 1

    def names(self) -> list[str]:
        """What its workers are called."""
        return [f"worker-{self.pool}-{number}" for number in range(1, self.workers + 1)]


def parse_pools(text: str, own: str) -> list[OtherPool]:
    """What `--pools` says, in its order. Raises PoolsError."""
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        match = _POOL.fullmatch(part)
        if match is None:
            raise PoolsError(f"{part!r} is not POOL=BACKEND or POOL=BACKEND*WORKERS")
        workers = int(match[3]) if match[3] else 1
        if not 1 <= workers <= MAX_WORKERS:
            raise PoolsError(f"{part!r}: workers must be from 1 to {MAX_WORKERS}")
        found.append(OtherPool(match[1], match[2], workers))
    names = [own, *(each.pool for each in found)]
    for name in names:
        if names.count(name) > 1:
            raise PoolsError(f"the pool {name!r} is there twice")
    return found
