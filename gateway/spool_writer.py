"""Group commit into the spool: whatever was added while the last group was on its way to the disk goes together.

Who adds a pair is called back when the disk has it, or does not take it; only then is the client answered.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from gateway.audit_pairs import Pair
from gateway.fault_log import log_fault
from gateway.spool import Spool, SpoolError
from scheduler.failpoints import failpoint

MAX_GROUP = 256
RETRY_S = 1.0
"""After the disk refused, requests are refused at the door; once in so long one group tries again."""


class Added(NamedTuple):
    """One pair, and who is told whether it is safe."""

    pair: Pair
    then: Callable[[bool], None]


class SpoolWriter:
    """The only one who appends. `thread` has one worker, and runs whatever touches the files."""

    def __init__(self, spool: Spool, thread: ThreadPoolExecutor, clock: Callable[[], float] = time.monotonic) -> None:
        self._spool = spool
        self._thread = thread
        self._clock = clock
        self._waiting: list[Added] = []
        self._writing: list[Added] = []
        self._wake = asyncio.Event()
        self._retry_at = 0.0
        self.problem: str | None = None
        self.groups = 0
        self.refused = 0  # Pairs that the disk did not take.

    @property
    def refusing(self) -> bool:
        """Whether what is added now would be refused in all likelihood."""
        return self._spool.full or (self.problem is not None and self._clock() < self._retry_at)

    def add(self, pair: Pair, then: Callable[[bool], None]) -> None:
        """Write this pair soon, and call `then` with whether it is safe."""
        self._waiting.append(Added(pair, then))
        self._wake.set()

    async def run(self) -> None:
        """Write whenever something was added; never ends by itself."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write everything that was added. What a cancelled flush left is written again, which does no harm."""
        while self._writing or self._waiting:
            if not self._writing:
                self._writing, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
            safe = await self._append([added.pair for added in self._writing])
            failpoint("spool_unanswered")
            group, self._writing = self._writing, []
            for added in group:
                _tell(added.then, safe=safe)

    async def _append(self, pairs: Sequence[Pair]) -> bool:
        self.groups += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._spool.append, pairs)
        except SpoolError as error:
            self._refused(str(error), len(pairs))
            return False
        except Exception as error:  # noqa: BLE001  # no fault may end this loop
            log_fault("writing the spool failed", error)
            self._refused("The spool cannot be written.", len(pairs))
            return False
        self.problem = None
        return True

    def _refused(self, problem: str, pairs: int) -> None:
        self.problem = problem
        self.refused += pairs
        self._retry_at = self._clock() + RETRY_S


def _tell(then: Callable[[bool], None], *, safe: bool) -> None:
    try:
        then(safe)
    except Exception as error:  # noqa: BLE001  # one callback's fault must not cost the others their answers
        log_fault("answering after the spool failed", error)
