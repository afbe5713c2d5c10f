"""`tierlane up --autoscale`: starts and stops workers of the stack's own pool as the gateway recommends.

The recommendation is read each second over one connection, so that of several gateways on one port the same one responds:
two gateways can take a step at different times. A worker that is removed finishes its running work first.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import aiohttp

from tierlane_local.child_process import ChildProcess
from tierlane_local.up.data_dir import LogLines
from tierlane_local.up.supervisor import Supervisor

POLL_S = 1.0
CALL_TIMEOUT_S = 1.0
LEAVE_S = 15.0
"""After its drain. A worker that does not stop in time is killed, and its batch is retried."""


class PoolAdvice(NamedTuple):
    """The recommendation of the gateway for the pool, with the number of healthy workers."""

    healthy: int
    recommended: int
    reason: str


def change(members: int, advice: PoolAdvice) -> int:
    """The number of workers to start or, if negative, to stop; `members` are those started and not stopping.

    A worker that is not healthy yet is neither replaced nor stopped, because it is starting or restarting.
    """
    if advice.recommended > members:
        return advice.recommended - members
    return min(0, advice.recommended - min(members, advice.healthy))


def free_names(taken: Iterable[str], count: int) -> list[str]:
    """The first unused names of workers."""
    names, number = set(taken), 0
    found: list[str] = []
    while len(found) < count:
        number += 1
        if (name := f"worker-{number}") not in names:
            found.append(name)
    return found


class WorkerAutoscaler:
    """The workers of the pool. `make` creates the process with a name."""

    def __init__(
        self,
        supervisor: Supervisor,
        make: Callable[[str], ChildProcess],
        lines: LogLines,
        *,
        pool: str,
        url: str,
        token: str,
    ) -> None:
        self._supervisor = supervisor
        self._make = make
        self._lines = lines
        self._pool = pool
        self._url = f"{url}/internal/autoscale"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._workers: list[ChildProcess] = []
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self, count: int) -> None:
        """Start the first workers. Raises OSError."""
        for name in free_names([], count):
            await self._add(name)

    async def follow(self) -> None:
        """Apply the recommendation each second, forever."""
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers) as session:
            while True:
                advice = await self._fetch(session)
                if advice is not None:
                    await self.apply(advice)
                await asyncio.sleep(POLL_S)

    async def apply(self, advice: PoolAdvice) -> None:
        """Start or stop workers."""
        more = change(len(self._workers), advice)
        if more:
            self._lines.say(f"{len(self._workers)} workers become {len(self._workers) + more}: {advice.reason}")
        for name in free_names((member.name for member in self._supervisor.members), max(0, more)):
            with contextlib.suppress(OSError):  # The process cannot be started now; the next recommendation repeats it.
                await self._add(name)
        for _ in range(-more):
            task = asyncio.create_task(self._supervisor.remove(self._workers.pop(), LEAVE_S))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _add(self, name: str) -> None:
        member = self._make(name)
        try:
            await self._supervisor.add(member)
        except OSError:
            self._supervisor.members.remove(member)
            raise
        self._workers.append(member)

    async def _fetch(self, session: aiohttp.ClientSession) -> PoolAdvice | None:
        """None without a valid response; then nothing changes."""
        try:
            async with session.get(self._url) as response:
                if response.status != 200:
                    return None
                row = (await response.json(content_type=None))["pools"][self._pool]
                return PoolAdvice(int(row["current_workers"]), int(row["recommended_workers"]), str(row["reason"]))
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return None
