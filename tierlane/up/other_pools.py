"""The other pools of a local stack: which there are, what their workers run, and the row that each model gets."""

import re
from dataclasses import dataclass

_POOL = re.compile(r"\s*([A-Za-z0-9_-]{1,64})=(.+?)(?:\*(\d{1,3}))?\s*")
MOST_WORKERS = 256


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
    found = [_parsed(part) for part in text.split(",") if part.strip()]
    names = [own, *(each.pool for each in found)]
    for name in names:
        if names.count(name) > 1:
            raise PoolsError(f"the pool {name!r} is there twice")
    return found


def _parsed(part: str) -> OtherPool:
    match = _POOL.fullmatch(part)
    if match is None:
        raise PoolsError(f"{part.strip()!r} is not POOL=BACKEND or POOL=BACKEND*WORKERS")
    workers = int(match[3]) if match[3] else 1
    if not 1 <= workers <= MOST_WORKERS:
        raise PoolsError(f"{part.strip()!r}: workers must be from 1 to {MOST_WORKERS}")
    return OtherPool(match[1], match[2], workers)
