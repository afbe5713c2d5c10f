"""Whether the direct endpoints of workers can be reached, asked while they are not needed: an address that nobody can connect
to, or another token, would else be found out in the outage that direct mode is for.

One probe at a time and a second, each worker's every half minute: a connection, a hello, a welcome, and the end of it. One that
fails is tried again soon, and told of from its second failure on, since a worker may just be restarting.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.direct_calls import DirectLine
from scheduler.fault_log import log_fault
from scheduler.protocol.direct import DirectError, Hello
from scheduler.protocol.pool_view import WorkerView

FIRST_S = 5.0
EVERY_S = 1.0
WELL_S, ILL_S = 30.0, 5.0  # Until a worker is probed again.
FAILURES = 2


class Unreachable(NamedTuple):
    """A worker whose direct endpoint cannot be used from here, and why in one sentence."""

    worker_id: str
    address: str
    why: str


class _Probed(NamedTuple):
    due: float
    failures: int = 0
    why: str = ""


class DirectProbe:
    """The loop. `workers` gives those that are known now, `wanted` whether to probe at all; `clock` is monotonic seconds."""

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerView]],
        wanted: Callable[[], bool],
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._wanted = wanted
        self._hello = hello
        self._clock = clock
        self._probed: dict[tuple[str, str], _Probed] = {}

    @property
    def unreachable(self) -> tuple[Unreachable, ...]:
        """Those that failed more than once in a row."""
        return tuple(Unreachable(*key, each.why) for key, each in self._probed.items() if each.failures >= FAILURES)

    async def run(self) -> None:
        """Probe for ever."""
        await asyncio.sleep(FIRST_S)
        while True:
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001  # no fault may end this loop
                log_fault("probing direct endpoints failed", error)
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Probe the worker that is longest due, if any."""
        known = {(worker.id, worker.direct) for worker in self._workers() if worker.healthy and worker.direct}
        self._probed = {key: each for key, each in self._probed.items() if key in known}
        now = self._clock()
        due = {key: self._probed.get(key, _Probed(0.0)) for key in known}
        key = min(due, key=lambda each: due[each].due, default=None)
        if key is None or due[key].due > now or not self._wanted():
            return
        before, line = due[key], DirectLine(*key, self._hello)
        try:
            await line.connect()
        except DirectError as error:
            self._probed[key] = _Probed(now + ILL_S, before.failures + 1, str(error))
        else:
            self._probed[key] = _Probed(now + WELL_S)
        finally:
            line.close()
