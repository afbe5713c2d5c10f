"""Probes of the workers' direct endpoints while they are not needed.

They detect an address that cannot be reached, or a wrong token, before direct mode needs the endpoint. One probe runs per
second, and each worker is probed every 30 seconds. A failed probe is retried sooner, and reported after the second failure.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.direct.worker_connection import WorkerConnection
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.direct import DirectError, Hello
from scheduler.protocol.pool_view import WorkerView

FIRST_PROBE_S = 5.0
PROBE_INTERVAL_S = 1.0
HEALTHY_INTERVAL_S, FAILED_INTERVAL_S = 30.0, 5.0  # Until the next probe of a worker.
MIN_FAILURES = 2


class Unreachable(NamedTuple):
    """A worker whose direct endpoint this gateway cannot use, and the reason in one sentence."""

    worker_id: str
    address: str
    why: str


class _Probed(NamedTuple):
    due: float
    failures: int = 0
    why: str = ""


class DirectProbe:
    """Probes direct endpoints. `workers`: the known workers; `enabled`: whether to probe; `clock`: monotonic seconds."""

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerView]],
        enabled: Callable[[], bool],
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._enabled = enabled
        self._hello = hello
        self._clock = clock
        self._probed: dict[tuple[str, str], _Probed] = {}

    @property
    def unreachable(self) -> tuple[Unreachable, ...]:
        """Workers whose last two probes or more failed."""
        return tuple(Unreachable(*key, each.why) for key, each in self._probed.items() if each.failures >= MIN_FAILURES)

    async def run(self) -> None:
        """Probe one worker a second; never returns."""
        await asyncio.sleep(FIRST_PROBE_S)
        while True:
            with LoggedFaults("probing direct endpoints failed"):
                await self.probe_next()
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def probe_next(self) -> None:
        """Probe the worker whose probe is due for the longest time, if any."""
        known = {(worker.id, worker.direct) for worker in self._workers() if worker.healthy and worker.direct}
        self._probed = {key: each for key, each in self._probed.items() if key in known}
        now = self._clock()
        due = {key: self._probed.get(key, _Probed(0.0)) for key in known}
        key = min(due, key=lambda each: due[each].due, default=None)
        if key is None or due[key].due > now or not self._enabled():
            return
        before, connection = due[key], WorkerConnection(*key, self._hello)
        try:
            await connection.connect()
        except DirectError as error:
            self._probed[key] = _Probed(now + FAILED_INTERVAL_S, before.failures + 1, str(error))
        else:
            self._probed[key] = _Probed(now + HEALTHY_INTERVAL_S)
        finally:
            connection.close()
